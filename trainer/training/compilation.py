"""torch.compile in a training: the network, CUDA graphs, and a cache that outlives processes."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trainer import storage
from trainer.launching.distributed import World
from trainer.model import fused_functions
from trainer.model.architecture import Architecture

Compile = Literal["off", "loss", "model", "graphs"]
"""What is compiled: nothing; the loss; the network as well; both with CUDA graphs."""

_LOG = logging.getLogger("compile")


def compile_detector(detector: Architecture, mode: Compile, world: World, sizes: int = 1) -> bool:
    """Set up the compilation that the configuration asks for, as far as the machine can, and log it.

    Compilation itself happens in the first steps. The weights' names do not change.

    Args:
        detector: the network that is trained, on its device.
        mode: see `Compile`; "graphs" means "model" where there is no GPU.
        world: this process and its device; rank 0 logs.
        sizes: how many sizes of the square the training has.

    Returns:
        Whether the network runs as CUDA graphs: see `hold_gradients`.
    """
    if not fused_functions.choose(mode != "off", world.device, tell=world.is_main) or mode not in (
        "model",
        "graphs",
    ):
        return False
    if sizes > 1:
        _allow_shapes(sizes)
    graphs = mode == "graphs" and world.device.type == "cuda"
    if not detector.compile_network("reduce-overhead" if graphs else "default"):
        if world.is_main:
            _LOG.warning("the network of %s is not compiled: no part of it may be", detector.title)
        return False
    if world.is_main:
        _LOG.info("the network is compiled%s", ", with CUDA graphs" if graphs else "")
    return graphs


def _allow_shapes(sizes: int) -> None:
    """Let the network be compiled once for each shape that a training has; torch gives up after eight.

    Args:
        sizes: of the square. The passes of a step may differ by an image, so each has two shapes.
    """
    # Imported late: it takes seconds.
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * sizes)


def hold_gradients(parameters: Sequence[Tensor]) -> None:
    """Allocate the gradient of every weight, for steps of several passes with CUDA graphs.

    A graph writes gradients to its own memory, which its next run overwrites: autograd would use that memory
    as the gradient, and lose the first pass (pytorch/pytorch issue 169545). To an allocated gradient it
    adds instead. The optimiser then has to zero gradients instead of dropping them.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def load_compiled(uri: str) -> bool:
    """Load the code that an earlier process of this run compiled; False if there is none.

    It is code, and is run: the folder must be as trusted as the image.
    """
    if not storage.exists(uri):
        return False
    if torch.compiler.load_cache_artifacts(storage.read_bytes(uri)) is None:
        _LOG.warning("what is in %s is no compiled code of this torch: compiling anew", uri)
        return False
    _LOG.info("took up compiled code from %s", uri)
    return True


def save_compiled(uri: str) -> bool:
    """Save the code that this process has compiled, for `load_compiled`; False if there is none."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return False
    storage.write_bytes(uri, saved[0])
    return True
