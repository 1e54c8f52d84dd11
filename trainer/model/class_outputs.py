"""Removes and adds class outputs: torchvision's have a background and unused ids, ours do not.

An output layer has anchors * classes * n channels: all classes of the first anchor first.
"""

from collections.abc import Sequence

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
COCO_OUTPUTS = len(_COCO_NAMES)
"""Outputs of torchvision's detectors of COCO: one for each id up to 90, though only 80 are classes."""
COCO_PLACES = {name: place for place, name in enumerate(_COCO_NAMES) if name not in ("__background__", "N/A")}
"""The output of each class of COCO in them."""
LAYER = "head.classification_head.cls_logits."
"""Prefix of the weight and bias of a dense detector's last classification convolution."""
UNUSED_BIAS = -20.0
"""Bias of an output that is never detected: a score of 2e-9."""


def select(layer: Tensor, classes: Sequence[int], total: int, anchors: int = 1) -> Tensor:
    """Weights or biases of a layer with `total` outputs, reduced to the outputs `classes` in this order."""
    return layer.unflatten(0, (anchors, total, -1))[:, list(classes)].flatten(0, 2)


def spread(layer: Tensor, classes: Sequence[int], total: int, anchors: int = 1, unused: float = 0) -> Tensor:
    """The reverse of `select`: `total` outputs, of which those not in `classes` have the value `unused`."""
    parts = layer.unflatten(0, (anchors, len(classes), -1))
    wider = parts.new_full((anchors, total, *parts.shape[2:]), unused)
    wider[:, list(classes)] = parts
    return wider.flatten(0, 2)


def places(names: Sequence[str]) -> tuple[list[int], int]:
    """Output of each class in torchvision's detectors, and the number of outputs.

    COCO's classes have the ids of torchvision's published weights; others follow the background.
    """
    if set(names) == set(COCO_PLACES):
        return [COCO_PLACES[name] for name in names], COCO_OUTPUTS
    return list(range(1, len(names) + 1)), len(names) + 1


def chosen(total: int, count: int) -> list[int]:
    """Which of torchvision's `total` outputs are the `count` classes; empty if the numbers do not fit."""
    if (total, count) == (COCO_OUTPUTS, len(COCO_PLACES)):
        return list(COCO_PLACES.values())
    return list(range(1, total)) if total == count + 1 else []


def from_torchvision(state: dict[str, Tensor], count: int, anchors: int) -> dict[str, Tensor]:
    """Weights of a dense detector without the outputs of background and unused ids, if `count` remain."""
    total = len(state.get(LAYER + "bias", ())) // anchors
    kept = chosen(total, count)
    return {
        name: select(value, kept, total, anchors) if kept and name.startswith(LAYER) else value
        for name, value in state.items()
    }


def to_torchvision(
    state: dict[str, Tensor], names: Sequence[str], anchors: int
) -> tuple[dict[str, Tensor], int]:
    """Weights of a dense detector with torchvision's outputs, and their number."""
    classes, total = places(names)
    wider = {
        LAYER + part: spread(state[LAYER + part], classes, total, anchors, unused)
        for part, unused in (("weight", 0.0), ("bias", UNUSED_BIAS))
    }
    return {**state, **wider}, total
