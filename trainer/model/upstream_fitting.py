"""Fits tensors of torchvision's detectors and classifiers to a detector of the same layout."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn

from trainer.base.errors import CheckpointError

BODY = "backbone.body."
"""Prefix of the names of a backbone's tensors in torchvision's detectors."""
COUNTER = "num_batches_tracked"
"""End of the name of a BatchNorm's counter; FrozenBatchNorm has none, and nothing depends on it."""
_SHOWN = 5


def as_detector(
    state: dict[str, Tensor], source: str, kind: str, head: str, foreign: str = ""
) -> dict[str, Tensor]:
    """Name tensors of a detector or ResNet as torchvision's detectors do, without a classifier's last layer.

    All detectors of a `kind` have names that begin with `head`, and none has some that begin with `foreign`.

    Raises:
        CheckpointError: the tensors are of something else.
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


def width_of(state: dict[str, Tensor]) -> int:
    """Channels of the first stage of the ResNet in a detector's or ResNet's tensors; 0 without a ResNet."""
    stems = (state.get(f"{prefix}conv1.weight") for prefix in ("", BODY, "module.", f"module.{BODY}"))
    return next((stem.shape[0] for stem in stems if stem is not None), 0)


def load(detector: nn.Module, state: dict[str, Tensor], source: str, class_layers: Collection[str]) -> str:
    """Load tensors of a detector or of its backbone alone, in place; returns a line for the log.

    Ignores tensors with unknown names, and those of `class_layers` (prefixes of names) if the shape differs.

    Raises:
        CheckpointError: a tensor has another shape, or is missing.
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
    wrong: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    missing: Iterable[str],
    foreign: Iterable[str] = (),
) -> str:
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
