"""torchvision's weights of RetinaNet and of ResNets: fits them to ours, and makes them of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_V2_Weights

from trainer.model import upstream_fitting
from trainer.model.architectures.retinanet import class_outputs

if TYPE_CHECKING:
    from trainer.model.architectures.retinanet.retinanet import RetinaNet

_COCO_NAMES = RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["categories"]
_UNUSED = ("__background__", "N/A")


def fit(detector: RetinaNet, state: dict[str, Tensor], source: str) -> str:
    """Load weights of torchvision's RetinaNet or of a ResNet classifier into `detector`, in place.

    Tensors of the classification layer are left as they are where their shape differs (other
    classes, other anchors): the head is then trained anew. Any other tensor must fit. Outputs of
    torchvision's detectors for the background and for unused ids are left out where the
    model has exactly the others.

    Returns:
        What was loaded, for the log.

    Raises:
        CheckpointError: they do not fit.
    """
    named = upstream_fitting.as_detector(state, source, "RetinaNet", "head.classification_head.")
    named = {_new_head_name(name): value for name, value in named.items()}
    return upstream_fitting.load(
        detector, _without_unused_classes(named, detector), source, (class_outputs.LAYER,)
    )


def torchvision_state(detector: RetinaNet, names: Sequence[str]) -> dict[str, Tensor]:
    """Weights for torchvision's RetinaNet, whose labels count from 1, the background being 0.

    Classes named as COCO's get the ids that torchvision's published weights give them: 91 outputs.
    Else there is one output more than classes. `fit` takes both back.

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
            state, [places[name] for name in names], len(_COCO_NAMES), detector.anchors_at_a_place
        )
    count = detector.num_classes
    return class_outputs.spread(state, range(1, count + 1), count + 1, detector.anchors_at_a_place)


def _without_unused_classes(state: dict[str, Tensor], detector: RetinaNet) -> dict[str, Tensor]:
    """Drop background and unused ids of torchvision's layout where the rest is our classes."""
    if class_outputs.LAYER + "bias" not in state or detector.label_offset:
        return state
    anchors, count = detector.anchors_at_a_place, detector.num_classes
    outputs = class_outputs.outputs(state, anchors)
    real = [place for place, name in enumerate(_COCO_NAMES) if name not in _UNUSED]
    if (outputs, count) == (len(_COCO_NAMES), len(real)):
        return class_outputs.select(state, real, anchors)
    return class_outputs.select(state, range(1, outputs), anchors) if outputs == count + 1 else state


def _new_head_name(name: str) -> str:
    """Rename the head convolutions of torchvision before 0.14: conv.2.weight -> conv.1.0.weight."""
    parts = name.split(".")
    if parts[0] == "head" and parts[2] == "conv" and len(parts) == 5:
        return ".".join([*parts[:3], str(int(parts[3]) // 2), "0", parts[4]])
    return name
