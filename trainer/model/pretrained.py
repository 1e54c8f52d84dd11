"""Pretrained weights: loads them, and fits them to a detector."""

import logging
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torchvision.models import get_weight
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

from trainer import storage
from trainer.errors import CheckpointError
from trainer.model import class_outputs
from trainer.model.detector import Detector

_TORCHVISION = "torchvision:"
_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
_UNUSED = ("__background__", "N/A")
_LOG = logging.getLogger("weights")


def load_pretrained(detector: Detector, uri: str) -> None:
    """Load weights of a detector or a backbone into `detector`, in place.

    Tensors of the classification layer are left as they are where their shape differs (other
    classes, other anchors): the head is then trained anew. Any other tensor must fit. Outputs of
    torchvision's detectors for the background and for unused ids are left out where the
    model has exactly the others.

    Args:
        detector: the detector to fill.
        uri: `torchvision:NAME` (e.g. torchvision:ResNet50_Weights.IMAGENET1K_V2), or a URI of
            a .pt, .pth or .safetensors file in torchvision's layout.

    Raises:
        CheckpointError: the file is no state dict, or does not fit the model.
        StorageError: the file cannot be read.
    """
    state = _without_unused_classes(_as_detector_state(_read(uri), uri), detector)
    expected = detector.state_dict()
    replaced = [
        name
        for name, value in state.items()
        if name.startswith("head.classification_head.cls_logits.") and expected[name].shape != value.shape
    ]
    wrong = [
        f"{name}: {_shape(state[name])} in the file, {_shape(expected[name])} in the model"
        for name in expected
        if name in state and name not in replaced and expected[name].shape != state[name].shape
    ]
    has_head = any(name.startswith("head.") for name in state)
    missing = [name for name in expected if name not in state and _expected(name, has_head)]
    if wrong or missing:
        raise CheckpointError(
            f"weights {uri} do not fit the model:\n  "
            + "\n  ".join((wrong + [f"{name}: missing" for name in missing])[:10]),
            fix="set model.version, backbone, norm and the widths as in the weights, or take others",
        )
    detector.load_state_dict(
        {k: v for k, v in state.items() if k in expected and k not in replaced}, strict=False
    )
    _LOG.info(
        "loaded %d tensors from %s%s",
        len(state) - len(replaced),
        uri,
        "; the classification layer is new" if replaced or not has_head else "",
    )


def torchvision_state(detector: Detector, names: Sequence[str]) -> dict[str, Tensor]:
    """Weights for torchvision's RetinaNet, whose labels count from 1, the background being 0.

    Classes named as COCO's get the ids that torchvision's published weights give them: 91 outputs.
    Else there is one output more than classes. `load_pretrained` takes both back.

    Args:
        detector: a detector of the published architecture; else no model of torchvision fits.
        names: of its classes, in label order.
    """
    state = detector.state_dict()
    if detector.label_offset:
        return state
    places = {name: place for place, name in enumerate(_COCO_NAMES) if name not in _UNUSED}
    if set(names) == set(places):
        return class_outputs.spread(
            state, [places[name] for name in names], len(_COCO_NAMES), _anchors_at_a_place(detector)
        )
    count = detector.num_classes
    return class_outputs.spread(state, range(1, count + 1), count + 1, _anchors_at_a_place(detector))


def _without_unused_classes(state: dict[str, Tensor], detector: Detector) -> dict[str, Tensor]:
    """Drop background and unused ids of torchvision's layout where the rest is our classes."""
    if class_outputs.LAYER + "bias" not in state or detector.label_offset:
        return state
    anchors, count = _anchors_at_a_place(detector), detector.num_classes
    outputs = class_outputs.outputs(state, anchors)
    real = [place for place, name in enumerate(_COCO_NAMES) if name not in _UNUSED]
    if (outputs, count) == (len(_COCO_NAMES), len(real)):
        return class_outputs.select(state, real, anchors)
    return class_outputs.select(state, range(1, outputs), anchors) if outputs == count + 1 else state


def _anchors_at_a_place(detector: Detector) -> int:
    return len(detector.config.anchor_scales) * len(detector.config.aspect_ratios)


def _expected(name: str, has_head: bool) -> bool:
    """Whether weights must hold this tensor: those of a backbone have neither pyramid nor heads."""
    if name.endswith("num_batches_tracked"):
        return False
    return has_head or name.startswith("backbone.body.")


def _read(uri: str) -> dict[str, Tensor]:
    if uri.startswith(_TORCHVISION):
        try:
            weight = get_weight(uri.removeprefix(_TORCHVISION))
        except ValueError as error:
            raise CheckpointError(
                f"torchvision has no weights {uri.removeprefix(_TORCHVISION)!r}: {error}",
                fix="use a name such as torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1",
            ) from None
        try:
            return dict(weight.get_state_dict(progress=False, check_hash=True))
        except OSError as error:
            raise CheckpointError(
                f"weights {uri} cannot be downloaded: {error}",
                fix="allow access to the weights' host, or copy the file to your storage and give its URI",
            ) from None
    path = storage.local_copy(uri)
    try:
        return _read_file(path)
    except Exception as error:  # torch.load has no common error of its own
        raise CheckpointError(
            f"weights {uri} cannot be read: {str(error).splitlines()[0]}",
            fix="give a .safetensors file, or a .pt/.pth file that holds nothing but tensors",
        ) from None


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError("it is not a dictionary of tensors")
    return state


def _as_detector_state(state: dict[str, Tensor], uri: str) -> dict[str, Tensor]:
    """Name the tensors as a Detector does; those of a classifier's last layer are dropped."""
    state = {name.removeprefix("module."): value for name, value in state.items()}
    if "conv1.weight" in state:
        return {f"backbone.body.{name}": value for name, value in state.items() if not name.startswith("fc.")}
    if "backbone.body.conv1.weight" not in state:
        raise CheckpointError(
            f"weights {uri} hold neither a torchvision RetinaNet nor a torchvision ResNet",
            fix="the tensors must be named backbone.body.conv1.weight, ... or conv1.weight, ...",
        )
    return {_new_head_name(name): value for name, value in state.items()}


def _new_head_name(name: str) -> str:
    """Rename the head convolutions of torchvision before 0.14: conv.2.weight -> conv.1.0.weight."""
    parts = name.split(".")
    if parts[0] == "head" and parts[2] == "conv" and len(parts) == 5:
        return ".".join([*parts[:3], str(int(parts[3]) // 2), "0", parts[4]])
    return name


def _shape(tensor: Tensor) -> str:
    return "x".join(str(side) for side in tensor.shape) or "scalar"
