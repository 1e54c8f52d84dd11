"""Fits tensors of torchvision's detectors and classifiers to a detector of the same layout."""

from collections.abc import Collection

from torch import Tensor, nn

from trainer.base.errors import CheckpointError

BODY = "backbone.body."
"""Prefix of the names of a backbone's tensors in torchvision's detectors."""


def as_detector(
    state: dict[str, Tensor], source: str, kind: str, head: str, foreign: str = ""
) -> dict[str, Tensor]:
    """Name tensors as torchvision's detectors do; those of a classifier's last layer are dropped.

    Args:
        state: of a detector, or of a ResNet.
        source: where they come from, for errors.
        kind: the detector's name, for errors.
        head: prefix of names that all detectors of this kind have.
        foreign: prefix of names that only detectors of another kind have, which have those too.

    Raises:
        CheckpointError: they are of something else.
    """
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv1.weight" in state:
        return {f"{BODY}{name}": value for name, value in state.items() if not name.startswith("fc.")}
    if f"{BODY}conv1.weight" not in state:
        raise CheckpointError(
            f"weights {source} hold neither a torchvision {kind} nor a torchvision ResNet",
            fix=f"the tensors must be named {BODY}conv1.weight, ... or conv1.weight, ...",
        )
    backbone_alone = all(name.startswith("backbone.") for name in state)
    reason = "" if any(name.startswith(head) for name in state) else f"no tensor of theirs is named {head}..."
    if foreign and any(name.startswith(foreign) for name in state):
        reason = f"tensors of theirs are named {foreign}..."
    if reason and not backbone_alone:
        raise CheckpointError(
            f"weights {source} are of another detector than {kind}: {reason}",
            fix="take weights of that detector or of a backbone, or set model.architecture to theirs",
        )
    return state


def width_of(state: dict[str, Tensor]) -> int:
    """Return the channels of the first stage of the ResNet that tensors hold; 0 where they hold none.

    Args:
        state: of a detector, or of a ResNet.
    """
    stems = (state.get(f"{prefix}conv1.weight") for prefix in ("", BODY, "module.", f"module.{BODY}"))
    return next((stem.shape[0] for stem in stems if stem is not None), 0)


def load(detector: nn.Module, state: dict[str, Tensor], source: str, class_layers: Collection[str]) -> str:
    """Load tensors into a detector, in place: all of a detector, or those of a backbone.

    Args:
        detector: what they are for.
        state: tensors by its names; those that it does not have are left out.
        source: where they come from, for errors.
        class_layers: prefixes of the names of layers that depend on the classes: they stay as they are
            where their shape differs.

    Returns:
        What was loaded, for the log.

    Raises:
        CheckpointError: a tensor has another shape, or is missing.
    """
    prefixes = tuple(class_layers)
    expected = detector.state_dict()
    replaced = [
        name
        for name, value in state.items()
        if name in expected and name.startswith(prefixes) and expected[name].shape != value.shape
    ]
    wrong = [
        f"{name}: {_shape(state[name])} in the file, {_shape(expected[name])} in the model"
        for name in expected
        if name in state and name not in replaced and expected[name].shape != state[name].shape
    ]
    has_head = any(not name.startswith("backbone.") for name in state)
    missing = [name for name in expected if name not in state and _must_be_there(name, has_head)]
    if wrong or missing:
        raise CheckpointError(
            f"weights {source} do not fit the model:\n  "
            + "\n  ".join((wrong + [f"{name}: missing" for name in missing])[:10]),
            fix="set model.backbone, norm and widths (retinanet: version) as in the weights, or take others",
        )
    fitting = {name: value for name, value in state.items() if name in expected and name not in replaced}
    detector.load_state_dict(fitting, strict=False)
    new = "; the classification layer is new" if replaced or not has_head else ""
    return f"loaded {len(state) - len(replaced)} tensors from {source}{new}"


def _must_be_there(name: str, has_head: bool) -> bool:
    """Whether weights must hold this tensor: those of a backbone have neither pyramid nor heads."""
    if name.endswith("num_batches_tracked"):
        return False
    return has_head or name.startswith(BODY)


def _shape(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "scalar"
