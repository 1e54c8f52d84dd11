"""When a training saves its state and validates, and how far it is."""

import math
import time

from trainer.config import TrainConfig
from trainer.distributed import broadcast
from trainer.state import TrainState


class Cadence:
    """The moments of a training, told after each step from its configuration and its state."""

    def __init__(self, config: TrainConfig, state: TrainState, *, images: int, global_batch: int) -> None:
        """Follow a training.

        Args:
            config: how long it is, and how often it saves and validates.
            state: where it is.
            images: of the training split.
            global_batch: images of a step over all processes.
        """
        self._config, self._state = config, state
        self._images, self._global_batch = images, global_batch
        self.steps = math.ceil(config.epochs * images / global_batch)
        """Of the whole training."""

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._state.samples // self._images

    @property
    def is_at_the_end(self) -> bool:
        """Whether the last step of all was made."""
        return self._state.step == self.steps

    def epoch_ended(self) -> bool:
        """Whether the last step completed an epoch, or the training."""
        before = (self._state.samples - self._global_batch) // self._images
        return self.is_at_the_end or (self._state.step > 0 and self.epoch > before)

    def validation_due(self) -> bool:
        """Whether the last step completed an epoch that is validated, and that was not yet."""
        due = self.epoch % self._config.validate_every == 0 or self.is_at_the_end
        return self.epoch_ended() and due and self._state.validated < self._state.step

    def weights_are_kept(self) -> bool:
        """Whether the last step completed an epoch whose weights train.keep_every keeps."""
        every = self._config.keep_every
        return bool(every) and self.epoch_ended() and self.epoch % every == 0

    def checkpoint_due(self, saved_at: float) -> bool:
        """Whether a state within an epoch is to be saved; to be asked in every process.

        Args:
            saved_at: when one was saved last, by `time.monotonic`.
        """
        config, step = self._config, self._state.step
        if config.checkpoint_steps and step % config.checkpoint_steps == 0:
            return True
        # Rank 0's clock decides for all; it is a message, so it is sent only now and then.
        if not config.checkpoint_minutes or step % config.log_every:
            return False
        return broadcast(time.monotonic() - saved_at > config.checkpoint_minutes * 60, self._state.world)
