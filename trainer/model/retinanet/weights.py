"""Converts weights from and to torchvision's RetinaNet.

Unlike ours, torchvision's detectors have outputs for a background and for unused ids. The output layer has
anchors * classes channels, which start with all classes of the first anchor.
"""

from collections.abc import Sequence

from torch import Tensor

from trainer.base.errors import CheckpointError
from trainer.model.weights import COCO_IDS, COCO_OUTPUTS, class_output_indices, select_outputs

BACKBONE = "backbone.body."  # prefix of the names of the backbone tensors
_HEAD = "head.classification_head."
CLASS_LAYER = "head.classification_head.cls_logits."
"""Prefix of the weight and bias of the last classification convolution."""
_UNUSED_BIAS = -20.0  # bias of an output that is never detected: a score of 2e-9


def rename_as_retinanet(state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename a RetinaNet's or ResNet's tensors to torchvision's RetinaNet, without the classifier layer."""
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv1.weight" in state:
        return {f"{BACKBONE}{name}": value for name, value in state.items() if not name.startswith("fc.")}
    if f"{BACKBONE}conv1.weight" not in state:
        raise CheckpointError(
            f"weights {source} contain neither a torchvision RetinaNet nor a torchvision ResNet",
            fix=f"the tensors must be named {BACKBONE}conv1.weight, ... or conv1.weight, ...",
        )
    is_backbone = all(name.startswith("backbone.") for name in state)
    if not is_backbone and not any(name.startswith(_HEAD) for name in state):
        raise CheckpointError(
            f"weights {source} are for a detector other than RetinaNet: no tensor is named {_HEAD}...",
            fix="use weights of RetinaNet or of a backbone, or set model.architecture to theirs",
        )
    return state


def remove_unused_outputs(state: dict[str, Tensor], count: int, anchors: int) -> dict[str, Tensor]:
    """Remove the outputs for background and unused ids, if `count` outputs remain."""
    total = len(state.get(CLASS_LAYER + "bias", ())) // anchors
    kept = class_output_indices(total, count)
    return {
        name: select_outputs(value, kept, total, anchors) if kept and name.startswith(CLASS_LAYER) else value
        for name, value in state.items()
    }


def add_unused_outputs(
    state: dict[str, Tensor], class_names: Sequence[str], anchors: int
) -> tuple[dict[str, Tensor], int]:
    """Add torchvision's additional outputs; return the weights and the total number of outputs."""
    classes, total = _torchvision_outputs(class_names)
    wider = {
        CLASS_LAYER + part: _scatter_outputs(state[CLASS_LAYER + part], classes, total, anchors, unused)
        for part, unused in (("weight", 0.0), ("bias", _UNUSED_BIAS))
    }
    return {**state, **wider}, total


def _scatter_outputs(
    layer: Tensor, classes: Sequence[int], total: int, anchors: int, unused: float
) -> Tensor:
    """Reverse `select_outputs`: outputs that are not in `classes` get the value `unused`."""
    parts = layer.unflatten(0, (anchors, len(classes), -1))
    wider: Tensor = parts.new_full((anchors, total, *parts.shape[2:]), unused)
    wider[:, list(classes)] = parts
    return wider.flatten(0, 2)


def _torchvision_outputs(class_names: Sequence[str]) -> tuple[list[int], int]:
    """Return the output index of each class in torchvision's detectors, and the number of outputs.

    COCO's classes have the ids of torchvision's published weights; other classes start after the background.
    """
    if set(class_names) == set(COCO_IDS):
        return [COCO_IDS[name] for name in class_names], COCO_OUTPUTS
    return list(range(1, len(class_names) + 1)), len(class_names) + 1
