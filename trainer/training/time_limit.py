"""Fits a training into its time limit, `train.minutes`.

The last step is chosen by the measured speed, and again when the speed changes. The learning rate follows the
position in the recipe's schedule, whose end is reached with the last step.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer.config.schema import Config

if TYPE_CHECKING:
    from trainer.launching.distributed import World

clock = time.monotonic  # seconds

STARTED = "KUBEDET_STARTED"
"""Environment variable: the start of the command or job that a process works for, in seconds (Unix time)."""

_REST_SECONDS = 30.0  # Least duration of evaluation and export, without their predictions.
_REST_STARTS = 4.5  # The same as a multiple of the training's start, which takes longer on a busy machine.
_EXPORT_PASSES = 2  # The export predicts the validation images with the model and with the file.
_FORWARD_RATIO = 3.0  # Images that are predicted in the time in which one is trained.
_CHECKS_PER_LIMIT = 60  # Checks of the speed until the limit.
_MAX_CHECK_SECONDS = 30.0  # Most seconds between two checks.
_MIN_RELATIVE_CHANGE = 0.1  # A smaller relative change of the remaining steps is not applied.
_MIN_WHOLE_SHARE = 0.9  # Share of the steps that may be left out to end with an epoch.
_LOG = logging.getLogger("train")


@dataclass(frozen=True)
class SplitSizes:
    """Numbers of images of a data set, by split."""

    train: int
    val: int = 0
    test: int = 0

    @classmethod
    def of(cls, samples: Mapping[str, int]) -> "SplitSizes":
        """Return the number of images of each split of an index."""
        return cls(*(samples.get(split, 0) for split in ("train", "val", "test")))

    def seconds_after(self, config: Config, rate: float, startup: float = 0.0) -> float:
        """Return the duration of evaluation and export, at most half of the limit.

        `rate` is trained images per second, `startup` the seconds that the training needed to start.
        """
        predicted = (self.test or self.val) + _EXPORT_PASSES * min(self.val, config.export.check_images)
        rest = max(_REST_SECONDS, _REST_STARTS * startup) + predicted / _FORWARD_RATIO / rate
        return min(rest, 30 * config.train.minutes)

    def validation_seconds(self, rate: float) -> float:
        """Return the duration of a validation."""
        return self.val / _FORWARD_RATIO / rate


def seconds_since_start() -> float:
    """Return the seconds since STARTED; 0 if it is not set."""
    now = time.time()
    return max(0.0, now - float(os.environ.get(STARTED, now)))


@dataclass(frozen=True)
class Pace:
    """The relation of steps to the recipe's schedule, and what it was measured by. Checkpoints contain it."""

    nominal: int  # Steps of the recipe's schedule.
    end: int  # Steps of the training.
    since: int = 0  # Step after which `end` was chosen.
    position: float = 0.0  # Position in the schedule at that step, in nominal steps.
    plain_from: int = -1  # First epoch without strong augmentation; -1 is the recipe's.
    startup: float = 0.0  # Seconds from the start of the training to its first step.
    spent: float = 0.0  # Seconds since the start of the training.
    worked: float = 0.0  # Seconds of it in steps.
    mark: int = 0  # Step of the last check.
    mark_worked: float = 0.0  # `worked` at that step.
    check: int = 1  # Step after which the next check is due.
    step_seconds: float = 0.0  # Measured duration of a step.
    validation_seconds: float = 0.0  # Duration of the last validation.
    announced: float = 0.0  # `step_seconds` at the last message about it.

    def at(self, step: int) -> float:
        """Return the position in the schedule after so many steps: the same number if nothing changed."""
        rest = self.nominal - self.position
        return self.position + rest * (step - self.since) / max(1, self.end - self.since)


class TimeLimit:
    """Measures the speed of a training and decides on its last step. Only rank 0 decides."""

    def __init__(
        self,
        config: Config,
        images: SplitSizes,
        global_batch: int,
        saved: dict[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        """Begin after `step` with the whole schedule, or with what a checkpoint saved of the same one."""
        self._config, self.images, self.batch = config, images, global_batch
        steps = math.ceil(config.train.epochs * images.train / global_batch)
        self.pace = Pace(steps, steps, mark=step, check=step + 1)
        self._first = -1 if saved else step + 1
        if saved:
            before = Pace(**saved["pace"])
            same = saved["minutes"] == config.train.minutes and before.nominal == steps
            self.pace = before
            if not same:
                self.pace = replace(before, nominal=steps, end=steps, since=0, position=0.0, plain_from=-1)
        self._start, self._spent = clock(), self.pace.spent if saved else seconds_since_start()
        self.begin()

    def begin(self) -> None:
        """Start the clock of the steps."""
        self._begun, self._worked = clock(), self.pace.worked
        if self._first > 0:
            self.pace = replace(self.pace, startup=self._now().spent)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Leave a validation out of the steps' time."""
        start = clock()
        yield
        seconds = clock() - start
        self._begun += seconds
        self.pace = replace(self.pace, validation_seconds=seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves."""
        return {"minutes": self._config.train.minutes, "pace": asdict(self._now())}

    def check(self, step: int, world: "World") -> None:
        """Measure the speed if that is due after a step, and choose the last step by it. A collective."""
        if self._config.train.minutes and step >= self.pace.check:
            from trainer.launching.distributed import broadcast  # imports PyTorch

            self.pace = broadcast(self._decided(step) if world.is_main else None, world)

    def _now(self) -> Pace:
        now = clock()
        spent, worked = self._spent + now - self._start, self._worked + now - self._begun
        return replace(self.pace, spent=spent, worked=worked)

    def _decided(self, step: int) -> Pace:
        pace, train = self._now(), self._config.train
        if step == self._first:  # It chooses kernels or compiles, and is slower.
            return replace(pace, mark=step, mark_worked=pace.worked, check=step + 1)
        seconds = max((pace.worked - pace.mark_worked) / (step - pace.mark), 1e-6)
        if pace.step_seconds:
            seconds = (seconds + pace.step_seconds) / 2
        rate, limit = self.batch / seconds, 60 * train.minutes
        check = step + max(1, int(min(limit / _CHECKS_PER_LIMIT, _MAX_CHECK_SECONDS) / seconds))
        validation = pace.validation_seconds or self.images.validation_seconds(rate)
        validations = max(1, round((1 - pace.at(step) / pace.nominal) * train.epochs / train.validate_every))
        left = limit - pace.spent - self.images.seconds_after(self._config, rate, pace.startup)
        # So many validations, at most one an epoch, and one at the end.
        each_epoch = left / (seconds + validation * self.batch / self.images.train)
        fitting = max((left - validations * validation) / seconds, each_epoch)
        fitting = min(fitting, (left - validation) / seconds)
        least = 0 if pace.step_seconds else 1  # The only step measured so far may have been slow by chance.
        end = min(step + max(least, int(fitting)), pace.nominal)
        epochs = math.ceil(end * self.batch // self.images.train * self.images.train / self.batch)
        if epochs > max(step, _MIN_WHOLE_SHARE * end):  # Rather than validate twice within a few steps.
            end = min(end, epochs)
        if abs(end - pace.end) > _MIN_RELATIVE_CHANGE * (pace.end - step):
            pace = self._ending(pace, step, end)
        if pace.step_seconds and not 0.5 < seconds / (pace.announced or math.inf) < 2:
            _LOG.info(
                "%.1f images/s: %d steps (%.1f epochs) fit into the time limit",
                rate,
                pace.end,
                pace.end * self.batch / self.images.train,
            )
            pace = replace(pace, announced=seconds)
        return replace(pace, mark=step, mark_worked=pace.worked, check=check, step_seconds=seconds)

    def _ending(self, pace: Pace, step: int, end: int) -> Pace:
        """Return the pace that ends with step `end`."""
        plain, epochs = self._config.loader.plain_epochs, self._config.train.epochs
        start = epochs - plain if pace.plain_from < 0 else pace.plain_from
        prepared = (step + self._config.loader.prefetch) * self.batch // self.images.train
        if plain and start > prepared:  # Else it has begun.
            last = math.ceil(end * self.batch / self.images.train)
            start = max(last - round(plain * end / pace.nominal), prepared + 1)
        return replace(pace, end=end, since=step, position=pace.at(step), plain_from=start)
