"""Names of a detector's tensors in its authors' files and in the hub's, as transformers' modules name them.

Sources, at the commits that detr_criterion.py names: `state_dict` of the networks in src/zoo/dfine of
github.com/Peterande/D-FINE and in rtdetrv2_pytorch/src/zoo/rtdetr of github.com/lyuwenyu/RT-DETR. The hub's
files are those of `save_pretrained`, also of older versions of transformers.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_Rules = tuple[tuple[str, str], ...]

BACKBONE_PREFIX = "model.backbone."
_STACKED = re.compile(r"(.+\.self_attn\.)in_proj_(weight|bias)")
"""Query, key and value of PyTorch's attention in one tensor."""
_CLASSIFIER = ("fc.", "head.", "last_conv.")
"""Prefixes of the tensors of a classifier that are not of its backbone."""

_HGNET: _Rules = (
    (r"^stem\.", "embedder."),
    (r"^stages\.", "encoder.stages."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
)
"""PPHGNetV2 by its authors, D-FINE's and timm."""
_RESNET: _Rules = (
    (r"^conv1\.conv1_1\.", "embedder.embedder.0."),
    (r"^conv1\.conv1_2\.", "embedder.embedder.1."),
    (r"^conv1\.conv1_3\.", "embedder.embedder.2."),
    (r"^res_layers\.(\d+)\.blocks\.", r"encoder.stages.\1.layers."),
    (r"\.branch2a\.", ".layer.0."),
    (r"\.branch2b\.", ".layer.1."),
    (r"\.branch2c\.", ".layer.2."),
    (r"\.short\.conv\.(?=conv|norm)", ".shortcut.1."),
    (r"\.short\.", ".shortcut."),
    (r"\.conv\.", ".convolution."),
    (r"\.norm\.", ".normalization."),
)
"""ResNet-vd."""
_HYBRID: _Rules = (
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
"""Encoder and decoder of D-FINE and RT-DETRv2."""
_RULES: dict[str, tuple[_Rules, _Rules]] = {
    "dfine": (
        _HGNET,
        (*_HYBRID, (r"\.linear1\.|\.fc1\.", ".mlp.layers.0."), (r"\.linear2\.|\.fc2\.", ".mlp.layers.1.")),
    ),
    "rtdetr": (
        _RESNET,
        (
            *_HYBRID,
            (r"\.num_points_scale$", ".n_points_scale"),
            (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
        ),
    ),
}
"""Rules of the backbone, whose names then follow `backbone.model.`, and of the rest."""


def library_names(state: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The tensors of a detector or backbone under the names of transformers' modules.

    Those that are already named so, or in no known way, keep their names.
    """
    backbone, rest = _RULES[architecture]
    inner = {name.removeprefix("module."): value for name, value in state.items()}
    inner = {name.removeprefix("model."): value for name, value in inner.items()}
    alone = not any(name.startswith("decoder.") for name in inner)
    renamed: dict[str, Tensor] = {}
    for name, value in inner.items():
        if alone and name.startswith(_CLASSIFIER):
            continue
        if alone or name.startswith("backbone."):
            bare = _renamed(name.removeprefix("backbone.").removeprefix("model."), backbone)
            renamed[f"{BACKBONE_PREFIX}model.{bare}"] = value
            continue
        # The hub's files have the heads once or twice.
        own = _renamed(re.sub(r"^(?=class_embed\.|bbox_embed\.)", "decoder.", name), rest)
        if stacked := _STACKED.fullmatch(own):
            for part, values in zip("qkv", value.chunk(3), strict=True):
                renamed[f"model.{stacked[1]}{part}_proj.{stacked[2]}"] = values
        elif own:
            renamed["model." + own] = value
    return renamed


def _renamed(name: str, rules: _Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
