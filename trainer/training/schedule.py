"""The position of a training run in its schedule, and what is due after a step.

The position is the number of completed optimizer steps. If `train.minutes` is too short for the configured
epochs, the position follows the elapsed time, so that the learning rate reaches its final value.
"""

import math
import time

from trainer.config.schema import Config
from trainer.launching.distributed import broadcast
from trainer.training.state import TrainState


class Schedule:
    """The schedule of a training run. Its position is the same on all ranks."""

    def __init__(
        self, config: Config, images: int, global_batch: int, state: TrainState, *, seconds: float = 0.0
    ) -> None:
        """Start at `state`, after `seconds` of training in earlier processes, with `images` per epoch."""
        self._config, self._images, self._batch, self._state = config, images, global_batch, state
        self.steps = math.ceil(config.train.epochs * images / global_batch)
        """Steps of the configured epochs. Training stops earlier if the time runs out."""
        self._limit = 60 * config.train.minutes
        self._seconds = self._earlier = seconds
        self._started: float | None = None
        self._share = self._agreed = self._elapsed_share(self._seconds)
        self._first_plain_epoch = -1
        self._validated_epoch = state.validated * global_batch // images

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including earlier processes; checkpoints save them."""
        return max(self._seconds, self._share * self._limit)

    @property
    def position(self) -> float:
        """Position in steps of the configured epochs: the completed steps, or more if time is short."""
        return max(self._state.step, self._share * self.steps)

    @property
    def ended(self) -> bool:
        """Whether all steps are done or the time has run out."""
        return self.position >= self.steps

    @property
    def expected_steps(self) -> int:
        """Total number of steps, estimated from the mean speed so far."""
        position = self.position
        return round(self._state.step * self.steps / position) if position else self.steps

    def measure_elapsed_share(self) -> float:
        """Return the share of `train.minutes` that has elapsed, measured with the clock of this process.

        The clock starts with the first call, after the first step, which may include compilation.
        """
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        self._seconds = self._earlier + now - self._started
        return self._elapsed_share(self._seconds)

    def set_elapsed_share(self, share: float) -> None:
        """Set the elapsed share of the time limit, the maximum over all ranks; `advance` applies it."""
        self._agreed = share

    def advance(self) -> None:
        """Update the position after a step."""
        self._share = max(self._share, self._agreed)

    def _elapsed_share(self, seconds: float) -> float:
        return min(1.0, seconds / self._limit) if self._limit else 0.0

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._state.samples // self._images

    def epoch_ended(self) -> bool:
        """Return whether the last step completed an epoch or the run."""
        before = (self._state.samples - self._batch) // self._images
        return self.ended or (self._state.step > 0 and self.epoch > before)

    def validation_due(self) -> bool:
        """Return whether a validation is due: after `train.validate_every` epochs, or when training ends."""
        every = self._config.train.validate_every
        due = self.ended or self._scheduled_epoch() // every > self._validated_epoch // every
        return due and self._state.validated < self._state.step

    def mark_validated(self) -> None:
        """Record that the state was validated, and update the elapsed time. A collective."""
        self._state.validated = self._state.step
        if self._limit:
            self.set_elapsed_share(broadcast(self.measure_elapsed_share(), self._state.world))
            self.advance()
        self._validated_epoch = self._scheduled_epoch()

    def _scheduled_epoch(self) -> int:
        return max(self.epoch, int(self._share * self._config.train.epochs))

    def checkpoint_due(self, saved_at: float) -> bool:
        """Return whether to save within an epoch; `saved_at` is a value of time.monotonic. A collective."""
        config, step = self._config.train, self._state.step
        if config.checkpoint_steps and step % config.checkpoint_steps == 0:
            return True
        # Rank 0's clock decides for all ranks, and only every `log_every` steps.
        if not config.checkpoint_minutes or step % config.log_every:
            return False
        return bool(
            broadcast(time.monotonic() - saved_at > config.checkpoint_minutes * 60, self._state.world)
        )

    def first_plain_epoch(self) -> int:
        """Return the first epoch without strong augmentation if the time limit shortens training, else -1.

        The decision is made before the first batch of an epoch is loaded: the epoch is plain if its middle is
        expected to fall into the share of the schedule that the configured plain epochs have.
        """
        loader, samples = self._config.loader, self._state.samples
        loaded = self._state.step + loader.prefetch
        epoch = (loaded + 1) * self._batch // self._images
        begins = epoch > loaded * self._batch // self._images
        if begins and self._first_plain_epoch < 0 and self._limit and loader.plain_epochs and samples:
            share = (epoch + 0.5) * self._images / samples * self.position / self.steps
            if share >= 1 - loader.plain_epochs / self._config.train.epochs:
                self._first_plain_epoch = epoch
        return self._first_plain_epoch
