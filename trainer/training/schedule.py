"""The position of a training in its schedule, and what is due after a step.

The position is the number of optimizer steps done. If `train.minutes` runs out before the configured epochs
are done, it is the used share of that time instead, so that the learning rate reaches its end with the time.
"""

import math
import time

from trainer.config.schema import Config
from trainer.launching.distributed import broadcast
from trainer.training.state import TrainState


class Schedule:
    """The schedule of a training. Its position is the same on all ranks."""

    def __init__(
        self, config: Config, images: int, global_batch: int, state: TrainState, *, seconds: float = 0.0
    ) -> None:
        """Begin at `state`, after `seconds` in earlier processes; `images` are those of an epoch."""
        self._config, self._images, self._batch, self._state = config, images, global_batch, state
        self.steps = math.ceil(config.train.epochs * images / global_batch)
        """Steps of the configured epochs. Fewer are done if the time runs out."""
        self._limit = 60 * config.train.minutes
        self._seconds = self._earlier = seconds
        self._started: float | None = None
        self._share = self._agreed = self._share_of(self._seconds)
        self._plain_from = -1
        self._validated_epoch = state.validated * global_batch // images

    @property
    def seconds(self) -> float:
        """Seconds of training so far, in all processes that resumed it; a checkpoint saves them."""
        return max(self._seconds, self._share * self._limit)

    @property
    def position(self) -> float:
        """Position in steps of the configured epochs: the steps done, or more if the time runs out."""
        return max(self._state.step, self._share * self.steps)

    @property
    def ended(self) -> bool:
        """Whether the training has done all its steps, or has used its time."""
        return self.position >= self.steps

    @property
    def expected_steps(self) -> int:
        """Steps of the whole training at its mean speed so far."""
        position = self.position
        return round(self._state.step * self.steps / position) if position else self.steps

    def measure(self) -> float:
        """Return the share of the time that this process has used.

        The clock starts with the first call, at the end of the first step: that one may compile or choose
        kernels.
        """
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        self._seconds = self._earlier + now - self._started
        return self._share_of(self._seconds)

    def agree(self, share: float) -> None:
        """Store the largest share of all ranks; it applies from the next `advance` on."""
        self._agreed = share

    def advance(self) -> None:
        """Update the position after a step."""
        self._share = max(self._share, self._agreed)

    def _share_of(self, seconds: float) -> float:
        return min(1.0, seconds / self._limit) if self._limit else 0.0

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self._state.samples // self._images

    def epoch_ended(self) -> bool:
        """Return whether the last step completed an epoch, or the training."""
        before = (self._state.samples - self._batch) // self._images
        return self.ended or (self._state.step > 0 and self.epoch > before)

    def validation_due(self) -> bool:
        """Return whether `train.validate_every` epochs of the schedule have passed, or all of it."""
        every = self._config.train.validate_every
        due = self.ended or self._scheduled_epoch() // every > self._validated_epoch // every
        return due and self._state.validated < self._state.step

    def validated(self) -> None:
        """Note that the state was validated. A collective: the validation took time."""
        self._state.validated = self._state.step
        if self._limit:
            self.agree(broadcast(self.measure(), self._state.world))
            self.advance()
        self._validated_epoch = self._scheduled_epoch()

    def _scheduled_epoch(self) -> int:
        return max(self.epoch, int(self._share * self._config.train.epochs))

    def checkpoint_due(self, saved_at: float) -> bool:
        """Return whether to save within an epoch; `saved_at` is in time.monotonic's seconds. A collective."""
        config, step = self._config.train, self._state.step
        if config.checkpoint_steps and step % config.checkpoint_steps == 0:
            return True
        # Rank 0's clock decides for all. The message is sent only every `log_every` steps.
        if not config.checkpoint_minutes or step % config.log_every:
            return False
        return bool(
            broadcast(time.monotonic() - saved_at > config.checkpoint_minutes * 60, self._state.world)
        )

    def plain_from(self) -> int:
        """Return the first epoch without strong augmentation if the time runs out; -1 for the recipe's.

        It is decided before the first batch of an epoch is loaded: the epoch is plain if its middle is
        expected after the share of the schedule at which the recipe's plain epochs begin.
        """
        loader, samples = self._config.loader, self._state.samples
        loaded = self._state.step + loader.prefetch
        epoch = (loaded + 1) * self._batch // self._images
        begins = epoch > loaded * self._batch // self._images
        if begins and self._plain_from < 0 and self._limit and loader.plain_epochs and samples:
            share = (epoch + 0.5) * self._images / samples * self.position / self.steps
            if share >= 1 - loader.plain_epochs / self._config.train.epochs:
                self._plain_from = epoch
        return self._plain_from
