"""Single steps of the training loop, with nothing around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from trainer.config import Config
from trainer.distributed import SINGLE, World
from trainer.loop import _Run


@contextmanager
def steps_of(
    config: Config, shards: str, output: str, world: World = SINGLE
) -> Iterator[tuple[_Run, Callable[[], Tensor]]]:
    """A run, and a function that does its next step and gives the step's sums."""
    run = _Run(config, shards, output, world, "none")
    batches = run.loader.batches(0)

    def step() -> Tensor:
        sums, _ = run.train_step([next(batches) for _ in range(run.loader.passes)])
        return sums

    try:
        yield run, step
    finally:
        run.close()
