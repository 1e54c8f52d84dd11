"""Names of DEIMv2's tensors.

Source: `state_dict` of the networks in engine of github.com/Intellindust-AI-Lab/DEIMv2 (0fff8d4).
"""

from trainer.model.detr.tensor_names import DFINE_MLP, HGNET, HYBRID, Rules, TensorRules

_DEIM_DINO: Rules = (
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
_DEIM_LITE: Rules = (
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
    *HYBRID,
    *DFINE_MLP,
    (r"\+", "_"),
)
"""Encoder and decoder of the sizes of DEIMv2 with `LiteEncoder`, which has the projections of its inputs."""
_DEIM: Rules = ((r"^encoder\.input_proj\.", "conv_encoder.encoder_input_proj."), *_DEIM_LITE)
HGNET_SIZES = TensorRules("model.conv_encoder.model.", HGNET, _DEIM)
LITE_SIZES = TensorRules("model.conv_encoder.model.", HGNET, _DEIM_LITE)
DINO_SIZES = TensorRules("model.conv_encoder.", _DEIM_DINO, _DEIM)
