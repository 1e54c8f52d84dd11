"""Fits tensors of torchvision's detectors and classifiers to a detector of the same layout, and back.

torchvision's detectors have outputs for a background and unused ids, ours do not. An output layer has
anchors * classes * n channels: all classes of the first anchor first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

from trainer.base.errors import CheckpointError

BODY = "backbone.body."  # prefix of the names of a backbone's tensors in torchvision's detectors
COUNTER = "num_batches_tracked"
"""End of the name of a BatchNorm's counter; FrozenBatchNorm has none, and nothing depends on it."""
_SHOWN = 5
_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
COCO_OUTPUTS = len(_COCO_NAMES)
"""Outputs of torchvision's detectors of COCO: one for each id up to 90, though only 80 are classes."""
COCO_PLACES = {name: place for place, name in enumerate(_COCO_NAMES) if name not in ("__background__", "N/A")}
"""The output of each class of COCO in them."""
LAYER = "head.classification_head.cls_logits."
"""Prefix of the weight and bias of a dense detector's last classification convolution."""
UNUSED_BIAS = -20.0  # bias of an output that is never detected: a score of 2e-9


def as_detector(
    state: dict[str, Tensor], source: str, kind: str, head: str, foreign: str = ""
) -> dict[str, Tensor]:
    """Name tensors of a detector or ResNet as torchvision's detectors do, without a classifier's last layer.

    All detectors of a `kind` have names that begin with `head`, and none has some that begin with `foreign`.
    """
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv1.weight" in state:
        return {f"{BODY}{name}": value for name, value in state.items() if not name.startswith("fc.")}
    if f"{BODY}conv1.weight" not in state:
        raise CheckpointError(
            f"weights {source} hold neither a torchvision {kind} nor a torchvision ResNet",
            fix=f"the tensors must be named {BODY}conv1.weight, ... or conv1.weight, ...",
        )
    reason = "" if any(name.startswith(head) for name in state) else f"no tensor is named {head}..."
    if foreign and any(name.startswith(foreign) for name in state):
        reason = f"some tensors are named {foreign}..."
    if reason and not all(name.startswith("backbone.") for name in state):
        raise CheckpointError(
            f"weights {source} are of another detector than {kind}: {reason}",
            fix="take weights of that detector or of a backbone, or set model.architecture to theirs",
        )
    return state


def load(detector: nn.Module, state: dict[str, Tensor], source: str, class_layers: Collection[str]) -> str:
    """Load tensors of a detector or of its backbone alone, in place; returns a line for the log.

    Ignores tensors with unknown names, and those of `class_layers` (prefixes of names) if the shape differs.
    """
    expected = detector.state_dict()
    has_head = any(not name.startswith("backbone.") for name in state)
    # Weights of a backbone have neither pyramid nor heads.
    missing = [
        name
        for name in expected
        if name not in state and (has_head or name.startswith(BODY)) and not name.endswith(COUNTER)
    ]
    differing = {
        name: (state[name].shape, value.shape)
        for name, value in expected.items()
        if name in state and state[name].shape != value.shape
    }
    replaced = {name for name in differing if name.startswith(tuple(class_layers))}
    wrong = {name: shapes for name, shapes in differing.items() if name not in replaced}
    if wrong or missing:
        raise CheckpointError(
            f"weights {source} do not fit the model:\n  {differences(wrong, missing)}",
            fix="set model.backbone, norm and widths (retinanet: version) as in the weights, or take others",
        )
    fitting = {name: value for name, value in state.items() if name in expected and name not in replaced}
    detector.load_state_dict(fitting, strict=False)
    new = "; the classification layer is new" if replaced or not has_head else ""
    return f"loaded {len(state) - len(replaced)} tensors from {source}{new}"


def differences(
    wrong: Mapping[str, tuple[Sequence[int], Sequence[int]]], missing: Iterable[str],
    foreign: Iterable[str] = (),
) -> str:  # fmt: skip
    """The first few tensors that do not fit, a line each.

    `wrong` has the shapes in the file and in the model; `missing` is only in the model, `foreign` only in
    the file.
    """
    lines = []
    for name, shapes in sorted(wrong.items()):
        given, expected = ("x".join(map(str, sides)) or "scalar" for sides in shapes)
        lines.append(f"{name}: {given} in the file, {expected} in the model")
    lines += [f"{name}: missing" for name in sorted(missing)]
    lines += [f"{name}: not in the model" for name in sorted(foreign)]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n  ".join(lines[:_SHOWN] + more)


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
