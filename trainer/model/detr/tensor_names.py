"""Renames tensors in files by the authors or from the hub to the names of transformers' modules.

Files on the hub were written by `save_pretrained`, some by older versions of transformers; those of RF-DETR
and DEIMv2 use the authors' names.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

RenameRules = tuple[tuple[str, str], ...]  # patterns and replacements, applied in order


class TensorRules(NamedTuple):
    """Rules to rename one network's tensors to the names of transformers' modules."""

    prefix: str  # prefix of the backbone's names
    backbone: RenameRules  # rules for backbone names, without the prefix
    others: RenameRules  # rules for all other names
    outer_heads: tuple[str, ...] = ()  # prefixes of heads outside of transformers' inner model


_STACKED = (
    (r"(.+\.(?:self_attn|attention)\.)(?:in_proj_|qkv\.)(weight|bias)", ("q_proj", "k_proj", "v_proj")),
    (r"(.+\.)swish_ffn\.w12\.(weight|bias)", ("mlp.gate_proj", "mlp.up_proj")),
)
"""Stacked tensors to split: query, key and value of an attention; the first two layers of a gated network."""
_CLASSIFIER = ("fc.", "head.", "last_conv.")
"""Prefixes of a classifier's tensors that do not belong to the backbone."""

HGNET: RenameRules = (
    (r"^stem\.", "embedder."),
    (r"^stages\.", "encoder.stages."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
)
"""Rules for PPHGNetV2 by its authors, by those of D-FINE and DEIMv2, and by timm."""
HYBRID: RenameRules = (
    (r"^(?=class_embed\.|bbox_embed\.)", "decoder."),  # heads that the hub's files have twice
    (r"^decoder\.(anchors|valid_mask)$", ""),  # constants
    (r"^decoder\.(?=decoder\.|denoising_class_embed|enc_)", ""),
    (r"^decoder\.dec_score_head\.", "decoder.class_embed."),
    (r"^decoder\.dec_bbox_head\.", "decoder.bbox_embed."),
    (r"^(decoder|encoder)\.input_proj\.(\d+)\.conv\.", r"\1_input_proj.\2.0."),
    (r"^(decoder|encoder)\.input_proj\.(\d+)\.norm\.", r"\1_input_proj.\2.1."),
    (r"^enc_output\.proj\.", "enc_output.0."),
    (r"^enc_output\.norm\.", "enc_output.1."),
    (r"^encoder\.encoder\.(\d+)\.layers\.", r"encoder.aifi.\1.layers."),
    (r"(_blocks\.\d+)\.cv2\.0\.", r"\1.csp_rep1."),
    (r"(_blocks\.\d+)\.cv2\.1\.", r"\1.conv2."),
    (r"(_blocks\.\d+)\.cv3\.0\.", r"\1.csp_rep2."),
    (r"(_blocks\.\d+)\.cv3\.1\.", r"\1.conv3."),
    (r"(_blocks\.\d+)\.cv(\d)\.", r"\1.conv\2."),
    (r"(downsample_convs\.\d+)\.0\.cv(\d)\.", r"\1.conv\2."),
    (r"\.norm1\.", ".self_attn_layer_norm."),
    (r"^(encoder\..*)\.norm2\.", r"\1.final_layer_norm."),
    (r"^(decoder\..*)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"\.norm3\.", ".final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.out_proj\.", ".o_proj."),
)
"""Rules for encoder and decoder of D-FINE and RT-DETRv2."""
DFINE_MLP: RenameRules = (
    (r"\.(?:linear|fc)1\.", ".mlp.layers.0."),
    (r"\.(?:linear|fc)2\.", ".mlp.layers.1."),
)


def rename_tensors(state: Mapping[str, Tensor], rules: TensorRules) -> dict[str, Tensor]:
    """Rename the tensors of a detector or backbone to the names of transformers' modules.

    Other tensors, and those that already have transformers' names, are not renamed.
    """
    short = rules.prefix.removeprefix("model.")
    inner = {name.removeprefix("module."): value for name, value in state.items()}
    inner = {name.removeprefix("model."): value for name, value in inner.items()}
    is_backbone = not any("decoder." in name for name in inner)
    renamed: dict[str, Tensor] = {}
    for name, value in inner.items():
        if is_backbone and name.startswith(_CLASSIFIER):
            continue
        if is_backbone or name.startswith(("backbone.", short)):
            bare = name.removeprefix(short) if name.startswith(short) else name.removeprefix("backbone.")
            own = _apply_rules(bare, rules.backbone)
            own = own and rules.prefix + own
        else:
            own = _apply_rules(name, rules.others)
            own = "model." + own if own and not own.startswith(rules.outer_heads) else own
        parts = {own: value} if own else {}
        for pattern, layers in _STACKED:
            if stacked := re.fullmatch(pattern, own):
                chunks = zip(layers, value.chunk(len(layers)), strict=True)
                parts = {f"{stacked[1]}{layer}.{stacked[2]}": values for layer, values in chunks}
                if f"{name}_mask" in inner:  # DINOv3's keys have no bias
                    del parts[f"{stacked[1]}k_proj.{stacked[2]}"]
        renamed |= parts
    return renamed


def _apply_rules(name: str, rules: RenameRules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
