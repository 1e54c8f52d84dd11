"""Loads published weights into detectors, and selects class outputs."""

from collections.abc import Collection, Sequence

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

from trainer.base.errors import CheckpointError
from trainer.model.architecture import Architecture

_COUNTER = "num_batches_tracked"
"""Suffix of the names of BatchNorm's counters. FrozenBatchNorm has no counter, and nothing depends on it."""
_MAX_SHOWN = 5
_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
COCO_OUTPUTS = len(_COCO_NAMES)
"""Number of outputs of published COCO detectors: one for each id up to 90, although only 80 are classes."""
COCO_IDS = {name: number for number, name in enumerate(_COCO_NAMES) if name not in ("__background__", "N/A")}
"""Output index of each COCO class in these detectors."""


def load_tensors(
    detector: Architecture,
    state: dict[str, Tensor],
    source: str,
    class_layers: Collection[str],
    *,
    body: str,
    refuse_unknown: bool = False,
) -> str:
    """Load tensors of a detector, or only of its backbone, in place; return a log message.

    Tensors of `class_layers` (name prefixes) are skipped if their shapes differ. Tensors with unknown names
    are skipped unless `refuse_unknown` is set. `body` is the name prefix of the backbone.
    """
    expected = detector.state_dict()
    # Weights of a backbone contain neither pyramid nor heads.
    is_whole = any(not name.startswith((body, "backbone.")) for name in state)
    lines, replaced = [], set()
    for name, value in sorted(expected.items()):
        if name in state and state[name].shape != value.shape:
            if name.startswith(tuple(class_layers)):
                replaced.add(name)
                continue
            given, own = ("x".join(map(str, tensor.shape)) or "scalar" for tensor in (state[name], value))
            lines.append(f"{name}: {given} in the file, {own} in the model")
    counted = [name for name in (*sorted(expected), *sorted(state)) if not name.endswith(_COUNTER)]
    lines += [
        f"{name}: missing" for name in counted if name not in state and (is_whole or name.startswith(body))
    ]
    lines += [f"{name}: not in the model" for name in counted if refuse_unknown and name not in expected]
    if lines:
        more = [f"and {len(lines) - _MAX_SHOWN} more"] if len(lines) > _MAX_SHOWN else []
        raise CheckpointError(
            f"weights {source} do not fit {detector.title}:\n  " + "\n  ".join(lines[:_MAX_SHOWN] + more),
            fix="set model.architecture, model.size or model.backbone, norm and widths as in the weights, "
            "or use other weights",
        )
    fitting = {name: value for name, value in state.items() if name in expected and name not in replaced}
    detector.load_state_dict(fitting, strict=False)
    new = "; the classification layer starts from scratch" if replaced else ""
    new = new if is_whole else "; all but the backbone starts from scratch"
    return f"loaded {len(fitting)} tensors from {source}{new}"


def select_outputs(layer: Tensor, classes: Sequence[int], total: int, anchors: int = 1) -> Tensor:
    """Select the outputs `classes`, in order, from the weight or bias of a layer with `total` outputs."""
    outputs: Tensor = layer.unflatten(0, (anchors, total, -1))[:, list(classes)]
    return outputs.flatten(0, 2)


def class_output_indices(total: int, count: int) -> list[int]:
    """Return the indices of `count` class outputs among `total` outputs; output 0 is the background.

    The result is empty if the counts do not match. 91 outputs for 80 classes have COCO's ids.
    """
    if (total, count) == (COCO_OUTPUTS, len(COCO_IDS)):
        return list(COCO_IDS.values())
    return list(range(1, total)) if total == count + 1 else []
