"""Names of RF-DETR's tensors.

Source: `state_dict` of the networks in rfdetr/models of github.com/roboflow/rf-detr (35ac6ab).
"""

from trainer.model.detr.tensor_names import Rules, TensorRules

_GROUP: Rules = (
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
_DINO: Rules = (
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
RFDETR = TensorRules("model.backbone.", _DINO, _GROUP, outer_heads=("class_embed.", "bbox_embed."))
