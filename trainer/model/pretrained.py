"""Pretrained weights: reads them, whatever detector they are for."""

import logging
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torchvision.models import get_weight

from trainer import storage
from trainer.errors import CheckpointError
from trainer.model.architecture import Architecture

_TORCHVISION = "torchvision:"
_LOG = logging.getLogger("weights")


def load_pretrained(detector: Architecture, uri: str) -> None:
    """Load weights of a detector or a backbone into `detector`, in place.

    Tensors of the class outputs are left as they are where their shape differs (other classes): they
    are then trained anew. Any other tensor must fit.

    Args:
        detector: the detector to fill.
        uri: `torchvision:NAME` (e.g. torchvision:ResNet50_Weights.IMAGENET1K_V2), or a URI of
            a .pt, .pth or .safetensors file in the layout of the architecture's library.

    Raises:
        CheckpointError: the file is no state dict, or does not fit the model.
        StorageError: the file cannot be read.
    """
    _LOG.info("%s", detector.load_upstream(_read(uri), uri))


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
