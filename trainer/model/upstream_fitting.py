"""Fits tensors of torchvision's RetinaNet and classifiers to a detector of the same layout, and back.

torchvision's detectors have outputs for a background and unused ids, ours do not. An output layer has
anchors * classes * n channels: all classes of the first anchor first.
"""

from collections.abc import Collection, Sequence

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

from trainer.base.errors import CheckpointError
from trainer.model.architecture import Architecture

BODY = "backbone.body."  # prefix of the names of a backbone's tensors in torchvision's detectors
COUNTER = "num_batches_tracked"
"""End of the name of a BatchNorm's counter; FrozenBatchNorm has none, and nothing depends on it."""
_SHOWN = 5
_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
COCO_OUTPUTS = len(_COCO_NAMES)
"""Outputs of torchvision's detectors of COCO: one for each id up to 90, though only 80 are classes."""
COCO_PLACES = {name: place for place, name in enumerate(_COCO_NAMES) if name not in ("__background__", "N/A")}
"""The output of each class of COCO in them."""
_HEAD = "head.classification_head."
_FCOS = "head.regression_head.bbox_ctrness."
"""Prefix of names that torchvision's FCOS has, whose other names are those of RetinaNet."""
LAYER = "head.classification_head.cls_logits."
"""Prefix of the weight and bias of the last classification convolution."""
UNUSED_BIAS = -20.0  # bias of an output that is never detected: a score of 2e-9


def as_retinanet(state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Name tensors of a RetinaNet or ResNet as torchvision's RetinaNet, without a classifier's last layer."""
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv1.weight" in state:
        return {f"{BODY}{name}": value for name, value in state.items() if not name.startswith("fc.")}
    if f"{BODY}conv1.weight" not in state:
        raise CheckpointError(
            f"weights {source} contain neither a torchvision RetinaNet nor a torchvision ResNet",
            fix=f"the tensors must be named {BODY}conv1.weight, ... or conv1.weight, ...",
        )
    reason = "" if any(name.startswith(_HEAD) for name in state) else f"no tensor is named {_HEAD}..."
    if any(name.startswith(_FCOS) for name in state):
        reason = f"some tensors are named {_FCOS}..."
    if reason and not all(name.startswith("backbone.") for name in state):
        raise CheckpointError(
            f"weights {source} are for a detector other than RetinaNet: {reason}",
            fix="use weights of RetinaNet or of a backbone, or set model.architecture to theirs",
        )
    return state


def load(
    detector: Architecture,
    state: dict[str, Tensor],
    source: str,
    class_layers: Collection[str],
    body: str = BODY,
    *,
    refuse_unknown: bool = False,
) -> str:
    """Load tensors of a detector or of its backbone alone, in place; returns a line for the log.

    Those of `class_layers` (prefixes of names) are ignored if the shape differs, those with unknown names too
    unless they are to be refused. `body` is the prefix of the backbone's names.
    """
    expected = detector.state_dict()
    # Weights of a backbone have neither pyramid nor heads.
    is_whole = any(not name.startswith((body, "backbone.")) for name in state)
    lines, replaced = [], set()
    for name, value in sorted(expected.items()):
        if name in state and state[name].shape != value.shape:
            if name.startswith(tuple(class_layers)):
                replaced.add(name)
                continue
            given, own = ("x".join(map(str, one.shape)) or "scalar" for one in (state[name], value))
            lines.append(f"{name}: {given} in the file, {own} in the model")
    counted = [name for name in (*sorted(expected), *sorted(state)) if not name.endswith(COUNTER)]
    lines += [
        f"{name}: missing" for name in counted if name not in state and (is_whole or name.startswith(body))
    ]
    lines += [f"{name}: not in the model" for name in counted if refuse_unknown and name not in expected]
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise CheckpointError(
            f"weights {source} do not fit {detector.title}:\n  " + "\n  ".join(lines[:_SHOWN] + more),
            fix="set model.architecture, model.size or model.backbone, norm and widths as in the weights, "
            "or use other weights",
        )
    fitting = {name: value for name, value in state.items() if name in expected and name not in replaced}
    detector.load_state_dict(fitting, strict=False)
    new = "; the classification layer is new" if replaced else ""
    new = new if is_whole else "; all but the backbone is new"
    return f"loaded {len(fitting)} tensors from {source}{new}"


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
    """Weights of a RetinaNet without the outputs of background and unused ids, if `count` remain."""
    total = len(state.get(LAYER + "bias", ())) // anchors
    kept = chosen(total, count)
    return {
        name: select(value, kept, total, anchors) if kept and name.startswith(LAYER) else value
        for name, value in state.items()
    }


def to_torchvision(
    state: dict[str, Tensor], names: Sequence[str], anchors: int
) -> tuple[dict[str, Tensor], int]:
    """Weights of a RetinaNet with torchvision's outputs, and their number."""
    classes, total = places(names)
    wider = {
        LAYER + part: spread(state[LAYER + part], classes, total, anchors, unused)
        for part, unused in (("weight", 0.0), ("bias", UNUSED_BIAS))
    }
    return {**state, **wider}, total
