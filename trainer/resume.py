"""Where a run resumes, whatever the number of processes is now."""

from typing import Any

from trainer import checkpoint, configuration
from trainer.config import Config
from trainer.data.sample_order import global_batch
from trainer.distributed import World, broadcast


def newest_checkpoint(folder: str, world: World) -> dict[str, Any] | None:
    """Read the newest checkpoint of a run, the same one on every rank; None before the first.

    Rank 0 chooses: machines may see different contents of a shared folder for a minute, and ranks that
    went on from different steps would wait for each other for ever.

    Raises:
        CheckpointError: there are some, and none can be read.
        StorageError: the folder cannot be read, or a rank does not see the file.
    """
    newest = checkpoint.read_latest(folder) if world.is_main else None
    step = broadcast(newest["step"] if newest else None, world)
    return checkpoint.read_step(folder, step) if step is not None and newest is None else newest


def step_size(config: Config, saved: dict[str, Any] | None, samples: int, world: World) -> int:
    """Return the samples of one optimiser step: as configured, or as when the run began.

    Args:
        config: the configuration.
        saved: the checkpoint to go on from, if any. Where it differs in nothing but the number
            of processes, its global batch is kept.
        samples: size of the training split.
        world: the processes.

    Raises:
        ConfigError, DataError: see `global_batch`.
    """
    configured = config.train.global_batch
    if not configured and saved:
        before = configuration.from_json(saved["config"], where="the checkpoint's configuration").train
        now = config.train
        same = (before.batch_size, before.accumulate) == (now.batch_size, now.accumulate)
        configured = saved["global_batch"] if same else 0
    return global_batch(
        samples, batch_size=config.train.batch_size, accumulate=config.train.accumulate,
        processes=world.size, configured=configured,
    )  # fmt: skip
