"""Pretrained weights: loads them, whatever detector they are for, once for all processes of a run."""

import logging

import torch
import torch.distributed as dist

from trainer.base.errors import KubedetError
from trainer.config.schema import ModelConfig
from trainer.launching.distributed import World, broadcast
from trainer.model.architecture import Architecture, build
from trainer.weights.weights_mirror import obtain

DATA_ROOT = "./data_root"
"""In whose mirror published weights are kept where nobody says otherwise, as for `kubedet run`."""

_LOG = logging.getLogger("weights")


def load_pretrained(detector: Architecture, uri: str, data_root: str = DATA_ROOT) -> None:
    """Load weights of a detector or a backbone into `detector`, in place.

    Tensors of the class outputs are left as they are where their shape differs (other classes): they
    are then trained anew. Any other tensor must fit.

    Args:
        detector: the detector to fill.
        uri: of published weights (`torchvision:NAME`, `hf:ORG/NAME`, https://...), or of a .pt, .pth or
            .safetensors file, or a folder with one, in the layout of the architecture's library.
        data_root: in whose mirror published weights are looked for, and to which they are fetched.

    Raises:
        CheckpointError: the file is no state dict, or does not fit the model.
        ConfigError: there are no published weights of that name.
        StorageError: the weights are not there and cannot be fetched, or cannot be read.
    """
    _LOG.info("%s", detector.load_upstream(obtain(uri, data_root).state(), uri))


def load_in_every_process(detector: Architecture, uri: str, data_root: str, world: World) -> None:
    """Load weights in rank 0, and give them to all others: one of any number of machines fetches them.

    A collective. An error of rank 0 is raised in every process.

    Args:
        detector: the detector to fill, on its device, in the default memory format.
        uri: see `load_pretrained`.
        data_root: see `load_pretrained`.
        world: the processes.

    Raises:
        CheckpointError, ConfigError, StorageError: see `load_pretrained`.
    """
    failure: KubedetError | None = None
    if world.is_main:
        try:
            load_pretrained(detector, uri, data_root)
        except KubedetError as error:
            failure = error
    failure = broadcast(failure, world)
    if failure:
        raise failure
    if world.size > 1:
        with torch.no_grad():
            for value in detector.state_dict().values():
                dist.broadcast(value, src=0)


def check_pretrained(config: ModelConfig, data_root: str) -> None:
    """See to it that a training can start from its weights: fetch them, and load them once.

    Args:
        config: options of the detector.
        data_root: see `load_pretrained`.

    Raises:
        CheckpointError, ConfigError, StorageError: see `load_pretrained`.
    """
    if config.weights:
        load_pretrained(build(config, num_classes=1), config.weights, data_root)
