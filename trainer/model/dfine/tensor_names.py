"""Names of D-FINE's and RT-DETRv2's tensors.

Sources: `state_dict` of the networks in src/zoo/dfine of github.com/Peterande/D-FINE (4a1f73a) and in
rtdetrv2_pytorch/src/zoo/rtdetr of github.com/lyuwenyu/RT-DETR (068dfde).
"""

from trainer.model.detr.tensor_names import DFINE_MLP, HGNET, HYBRID, Rules, TensorRules

_RESNET: Rules = (
    *((rf"^conv1\.conv1_{place + 1}\.", f"embedder.embedder.{place}.") for place in range(3)),
    (r"^res_layers\.(\d+)\.blocks\.", r"encoder.stages.\1.layers."),
    *((rf"\.branch2{letter}\.", f".layer.{place}.") for place, letter in enumerate("abc")),
    (r"\.short\.conv\.(?=conv|norm)", ".shortcut.1."),
    (r"\.short\.", ".shortcut."),
    (r"\.conv\.", ".convolution."),
    (r"\.norm\.", ".normalization."),
)
"""ResNet-vd."""
_RTDETR_MLP: Rules = (
    (r"\.num_points_scale$", ".n_points_scale"),
    (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
)
DFINE = TensorRules("model.backbone.model.", HGNET, (*HYBRID, *DFINE_MLP))
RTDETR = TensorRules("model.backbone.model.", _RESNET, (*HYBRID, *_RTDETR_MLP))
