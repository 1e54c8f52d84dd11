"""torchvision's weights of RetinaNet and of ResNets: fits them to ours, and makes them of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.model import class_outputs, upstream_fitting

if TYPE_CHECKING:
    from trainer.model.architectures.retinanet.retinanet import RetinaNet


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
    named = upstream_fitting.as_detector(
        state, source, "RetinaNet", "head.classification_head.", foreign="head.regression_head.bbox_ctrness."
    )
    named = {_new_head_name(name): value for name, value in named.items()}
    if not detector.label_offset:
        named = class_outputs.without_unused(named, detector.num_classes, detector.anchors_at_a_place)
    return upstream_fitting.load(detector, named, source, (class_outputs.LAYER,))


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
    return class_outputs.spread(state, *class_outputs.places(names), detector.anchors_at_a_place)


def _new_head_name(name: str) -> str:
    """Rename the head convolutions of torchvision before 0.14: conv.2.weight -> conv.1.0.weight."""
    parts = name.split(".")
    if parts[0] == "head" and parts[2] == "conv" and len(parts) == 5:
        return ".".join([*parts[:3], str(int(parts[3]) // 2), "0", parts[4]])
    return name
