"""Selects and inserts class outputs of the head: without the background, or as torchvision has them.

The last classification convolution has A * C channels, all classes of the first anchor first. A
sigmoid head never learns class 0 (background) or ids that no category has: without them the model
is the same and smaller (80 outputs instead of 91 for COCO, 600 instead of 601 for Open Images).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
_UNUSED = ("__background__", "N/A")
COCO_OUTPUTS = len(_COCO_NAMES)
"""Outputs of torchvision's detectors of COCO: an output for each id up to 90, though only 80 are classes."""
COCO_PLACES = {name: place for place, name in enumerate(_COCO_NAMES) if name not in _UNUSED}
"""The output of each class of COCO in them."""
LAYER = "head.classification_head.cls_logits."
"""Prefix of the names of that convolution's weight and bias."""
UNUSED_BIAS = -20.0
"""Bias of an output that is never detected: a score of 2e-9."""


def outputs(state: dict[str, Tensor], anchors: int) -> int:
    """Number of class outputs of a detector's weights, with `anchors` anchors at each place."""
    return state[LAYER + "bias"].shape[0] // anchors


def select(state: dict[str, Tensor], classes: Sequence[int], anchors: int) -> dict[str, Tensor]:
    """Weights whose output i is the output classes[i] of these.

    Args:
        state: a detector's weights, in torchvision's layout.
        classes: outputs to take, in their new order.
        anchors: anchors at each place.
    """
    count = outputs(state, anchors)
    index = torch.tensor(classes, dtype=torch.int64)
    chosen = {
        name: value.unflatten(0, (anchors, count)).index_select(1, index.to(value.device)).flatten(0, 1)
        for name, value in state.items()
        if name.startswith(LAYER)
    }
    return {**state, **chosen}


def spread(state: dict[str, Tensor], classes: Sequence[int], total: int, anchors: int) -> dict[str, Tensor]:
    """Weights with `total` outputs, whose output classes[i] is the output i of these.

    The other outputs are never detected. This reverses `select`: a checkpoint trained here without
    background loads into torchvision's model.

    Args:
        state: a detector's weights, in torchvision's layout.
        classes: where each output goes.
        total: outputs afterwards.
        anchors: anchors at each place.
    """
    count = outputs(state, anchors)
    index = torch.tensor(classes, dtype=torch.int64)
    wider = dict(state)
    for kind, unused in (("weight", 0.0), ("bias", UNUSED_BIAS)):
        value = state[LAYER + kind]
        parts = value.unflatten(0, (anchors, count))
        target = value.new_full((anchors, total, *value.shape[1:]), unused)
        wider[LAYER + kind] = target.index_copy(1, index.to(value.device), parts).flatten(0, 1)
    return wider


def places(names: Sequence[str]) -> tuple[list[int], int]:
    """Where torchvision's detectors have their classes, of which they count the background as class 0.

    Classes named as COCO's get the ids that torchvision's published weights give them.

    Args:
        names: of the classes, in label order.

    Returns:
        The output of each class, and how many outputs there are.
    """
    if set(names) == set(COCO_PLACES):
        return [COCO_PLACES[name] for name in names], COCO_OUTPUTS
    return list(range(1, len(names) + 1)), len(names) + 1


def chosen(total: int, count: int) -> list[int]:
    """Which of torchvision's outputs are classes, in label order.

    Args:
        total: outputs that weights have.
        count: classes.

    Returns:
        An output for each class; none where the two do not belong together.
    """
    if (total, count) == (COCO_OUTPUTS, len(COCO_PLACES)):
        return list(COCO_PLACES.values())
    return list(range(1, total)) if total == count + 1 else []


def without_unused(state: dict[str, Tensor], count: int, anchors: int) -> dict[str, Tensor]:
    """Weights without the outputs of background and unused ids, where the rest is `count` classes."""
    if LAYER + "bias" not in state:
        return state
    kept = chosen(outputs(state, anchors), count)
    return select(state, kept, anchors) if kept else state
