"""Loads pretrained weights of any detector, once for all processes of a run."""

import logging

import torch
import torch.distributed as dist

from trainer.base.errors import CheckpointError, KubedetError
from trainer.config.schema import ModelConfig
from trainer.launching.distributed import World, broadcast
from trainer.model.architecture import Architecture, build
from trainer.weights.weights_mirror import fetch_if_needed

DATA_ROOT = "./data_root"  # default data root, as in `kubedet run`

_LOG = logging.getLogger("weights")


def load_pretrained(detector: Architecture, uri: str, data_root: str = DATA_ROOT) -> None:
    """Load weights of a detector or a backbone into `detector`, in place.

    Class outputs with a different shape are skipped; all other tensors must fit. For `uri`
    see `trainer.weights.weights_mirror`; `data_root` contains the mirror.
    """
    file = fetch_if_needed(uri, data_root)
    state, config = file.state(), detector.config
    shapes = {name: value.shape for name, value in state.items()}
    options = config.options_from_weights(file.config_json, shapes)
    conflicts = {name: value for name, value in options.items() if value != getattr(config, name)}
    if conflicts:
        theirs = ", ".join(f"model.{name}={value}" for name, value in conflicts.items())
        ours = ", ".join(f"{getattr(config, name)}" for name in conflicts)
        raise CheckpointError(
            f"weights {uri} are for {theirs}, not for {ours}",
            fix="omit these options so that the weights define them, or use other weights",
        )
    _LOG.info("%s", detector.load_upstream(state, uri))


def load_and_broadcast(detector: Architecture, uri: str, data_root: str, world: World) -> None:
    """Load weights on rank 0 and broadcast them, so that only one machine fetches them. A collective.

    The detector must be on its device, in the default memory format. If rank 0 fails, all ranks raise its
    error.
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
    """Check that the configured weights can be fetched and loaded, if there are any."""
    if config.weights:
        load_pretrained(build(config, num_classes=1), config.weights, data_root)
