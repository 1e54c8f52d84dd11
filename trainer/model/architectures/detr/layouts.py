"""Names of a detector's tensors in its authors' files and in the hub's, as transformers' modules name them.

Sources: `state_dict` of the networks in src/zoo/dfine of github.com/Peterande/D-FINE (4a1f73a), in
rtdetrv2_pytorch/src/zoo/rtdetr of github.com/lyuwenyu/RT-DETR (068dfde), in rfdetr/models of
github.com/roboflow/rf-detr (35ac6ab), and in engine of github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4). The
hub's files are those of `save_pretrained`, also of older versions of transformers; RF-DETR's and DEIMv2's
have their authors' names.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_Rules = tuple[tuple[str, str], ...]

_STACKED = (
    (r"(.+\.(?:self_attn|attention)\.)(?:in_proj_|qkv\.)(weight|bias)", ("q_proj", "k_proj", "v_proj")),
    (r"(.+\.)swish_ffn\.w12\.(weight|bias)", ("mlp.gate_proj", "mlp.up_proj")),
)
"""Tensors of several layers in one: an attention's query, key and value; a gated network's first two."""
_HEADS = ("class_embed.", "bbox_embed.")  # heads outside of the inner model
_CLASSIFIER = ("fc.", "head.", "last_conv.")
"""Prefixes of the tensors of a classifier that are not of its backbone."""

_HGNET: _Rules = (
    (r"^stem\.", "embedder."),
    (r"^stages\.", "encoder.stages."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
)
"""PPHGNetV2 by its authors, D-FINE's, DEIMv2's and timm."""
_RESNET: _Rules = (
    *((rf"^conv1\.conv1_{place + 1}\.", f"embedder.embedder.{place}.") for place in range(3)),
    (r"^res_layers\.(\d+)\.blocks\.", r"encoder.stages.\1.layers."),
    *((rf"\.branch2{letter}\.", f".layer.{place}.") for place, letter in enumerate("abc")),
    (r"\.short\.conv\.(?=conv|norm)", ".shortcut.1."),
    (r"\.short\.", ".shortcut."),
    (r"\.conv\.", ".convolution."),
    (r"\.norm\.", ".normalization."),
)
"""ResNet-vd."""
_HYBRID: _Rules = (
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
"""Encoder and decoder of D-FINE and RT-DETRv2."""
_GROUP: _Rules = (
    (r"^transformer\.", ""),
    (r"^refpoint_embed\.", "reference_point_embed."),
    (r"^decoder\.norm\.", "decoder.layernorm."),
    (r"\.norm1\.", ".self_attn_layer_norm."),
    (r"\.norm2\.", ".cross_attn_layer_norm."),
    (r"\.norm3\.", ".layer_norm."),
    (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
    (r"\.out_proj\.", ".o_proj."),
)
"""Decoder of RF-DETR."""
_DINO: _Rules = (
    (r"^0\.encoder\.(encoder\.)?", "backbone."),
    (r"^0\.projector\.", "projector."),
    (r"\.attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r".attention.\1_proj."),
    (r"\.attention\.output\.(dense\.)?", ".attention.o_proj."),
    (r"\.m\.(\d+)\.", r".bottlenecks.\1."),
    (r"\.cv(\d)\.", r".conv\1."),
    (r"^(projector\..*)\.bn\.", r"\1.norm."),
    (r"^projector\.stages\.0\.0\.", "projector.projector_layer."),
    (r"^projector\.stages\.0\.1\.", "projector.layer_norm."),
)
"""Backbone of RF-DETR."""
_DFINE_MLP: _Rules = ((r"\.(?:linear|fc)1\.", ".mlp.layers.0."), (r"\.(?:linear|fc)2\.", ".mlp.layers.1."))
_RTDETR_MLP: _Rules = (
    (r"\.num_points_scale$", ".n_points_scale"),
    (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
)
_DEIM_DINO: _Rules = (
    (r"^.*(mask_token|rope_embed\.periods|bias_mask)$", ""),  # constants
    (r"^(dinov3\.)?(_model\.)?(?=(cls_token|storage_tokens|patch_embed|blocks|norm)\b)", "backbone."),
    (r"^backbone\.blocks\.", "backbone.model.layer."),
    (r"^backbone\.cls_token$", "backbone.embeddings.cls_token"),
    (r"^backbone\.storage_tokens$", "backbone.embeddings.register_tokens"),
    (r"^backbone\.patch_embed\.proj\.", "backbone.embeddings.patch_embeddings."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.attn\.", ".attention."),
    (r"\.ls(\d)\.gamma$", r".layer_scale\1.lambda1"),
    (r"\.mlp\.w1\.", ".mlp.gate_proj."),
    (r"\.mlp\.(fc1|w2)\.", ".mlp.up_proj."),
    (r"\.mlp\.(fc2|w3)\.", ".mlp.down_proj."),
    (r"^(conv|norm)s\.(\d)\.", r"fusion_proj.\2.\1."),
    (r"^sta\.(stem\.0|conv2\.0|conv[34]\.1)\.", r"sta.\1.conv."),
    (r"^sta\.(stem\.1|conv2\.1|conv[34]\.2)\.", r"sta.\1.norm."),
    (r"^sta\.stem\.\d\.", "spatial_tuning_adapter.stem_conv."),
    (r"^sta\.conv(\d)\.\d\.", r"spatial_tuning_adapter.conv\1."),
)
"""Backbone of DEIMv2 on DINOv3, and DINOv3 by Meta."""
_DEIM_LITE: _Rules = (
    (r"(_blocks?(?:\.\d+)?)\.cv1\.", r"\1.conv1."),
    (r"(_blocks?(?:\.\d+)?)\.cv2\.0\.", r"\1.csp_rep1."),
    (r"(_blocks?(?:\.\d+)?)\.cv2\.1\.", r"\1.csp_rep1.conv2."),
    (r"(_blocks?(?:\.\d+)?)\.cv3\.0\.", r"\1.csp_rep2."),
    (r"(_blocks?(?:\.\d+)?)\.cv3\.1\.", r"\1.csp_rep2.conv2."),
    (r"(_blocks?(?:\.\d+)?)\.cv4\.", r"\1.conv2."),
    (r"^encoder\.down_sample(\d)\.1\.", r"encoder.down_conv\1.conv."),
    (r"^encoder\.down_sample(\d)\.2\.", r"encoder.down_conv\1.norm."),
    (r"^encoder\.bi_fusion\.cv\.", "encoder.bi_fusion_conv."),
    (r"^encoder\.input_proj\.(?=\d)", "encoder.input+proj."),
    (r"^(decoder\..*)\.scale$", r"\1.weight"),
    (r"\.swish_ffn\.w3\.", ".mlp.down_proj."),
    *_HYBRID,
    *_DFINE_MLP,
    (r"\+", "_"),
)
"""Encoder and decoder of the sizes of DEIMv2 with `LiteEncoder`, which has the projections of its inputs."""
_DEIM: _Rules = ((r"^encoder\.input_proj\.", "conv_encoder.encoder_input_proj."), *_DEIM_LITE)
_RULES: dict[str, tuple[str, _Rules, _Rules]] = {
    "dfine": ("model.backbone.model.", _HGNET, (*_HYBRID, *_DFINE_MLP)),
    "rtdetr": ("model.backbone.model.", _RESNET, (*_HYBRID, *_RTDETR_MLP)),
    "rfdetr": ("model.backbone.", _DINO, _GROUP),
    "deimv2": ("model.conv_encoder.model.", _HGNET, _DEIM),
    "deimv2 dino": ("model.conv_encoder.", _DEIM_DINO, _DEIM),
    "deimv2 lite": ("model.conv_encoder.model.", _HGNET, _DEIM_LITE),
}
"""Of each layout: the prefix of the backbone's names, and the rules of what follows it and of the others."""


def library_names(state: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """The tensors of a detector or backbone under the names of transformers' modules.

    Those that are already named so, or in no known way, keep their names.
    """
    prefix, backbone, rest = _RULES[layout]
    short = prefix.removeprefix("model.")
    inner = {name.removeprefix("module."): value for name, value in state.items()}
    inner = {name.removeprefix("model."): value for name, value in inner.items()}
    alone = not any("decoder." in name for name in inner)
    renamed: dict[str, Tensor] = {}
    for name, value in inner.items():
        if alone and name.startswith(_CLASSIFIER):
            continue
        if alone or name.startswith(("backbone.", short)):
            bare = name.removeprefix(short) if name.startswith(short) else name.removeprefix("backbone.")
            bare = _renamed(bare, backbone)
            own = bare and prefix + bare
        else:
            own = _renamed(name, rest)
            own = "model." + own if own and not (rest is _GROUP and own.startswith(_HEADS)) else own
        parts = {own: value} if own else {}
        for pattern, layers in _STACKED:
            if stacked := re.fullmatch(pattern, own):
                chunks = zip(layers, value.chunk(len(layers)), strict=True)
                parts = {f"{stacked[1]}{layer}.{stacked[2]}": values for layer, values in chunks}
                if f"{name}_mask" in inner:  # DINOv3's keys have no bias
                    del parts[f"{stacked[1]}k_proj.{stacked[2]}"]
        renamed |= parts
    return renamed


def _renamed(name: str, rules: _Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
