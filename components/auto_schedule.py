"""Automatic choice of epochs, image size, batch and validations for a data set, a machine and a time.

The choice follows from the number of images and from the speed that is measured before the training
(`train.minutes`). It is stored in the run's folder, where a resumed run reads it. Values that the user set
stay.
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from trainer import storage
from trainer.base.errors import DamagedError, FormError
from trainer.config.parsing import with_overrides
from trainer.config.schema import QUICK_MINUTES, Config

FILE = "plan.json"  # In the run's folder: the settings, the values chosen for them, and the estimated time.
_REFERENCE_IMAGES = (
    300  # Images that a recipe's epochs are meant for; fewer get more epochs, up to three times.
)
_STEPS = 10  # Steps that an epoch should have, if a smaller batch makes that possible.
_SIDE_FACTORS = (1.0, 0.8, 0.6)  # Image sizes that are tried, relative to the recipe's.
_MIN_EPOCHS_SHARE = 0.6  # A larger image is preferred if this share of the epochs remains.
_MIN_IMAGES_SEEN = 1500  # Images to train on, however long that takes, in five epochs at most.
_OVERHEAD = 1.2  # Duration of a training relative to its passes: loading, the optimizer, writing.
_FORWARD_RATIO = 3.0  # Images that are predicted in the time in which one is trained.
_REST_SECONDS = 60.0  # The rest of a run: start of its processes, the files of the exported model.
_EXPORT_PASSES = 2  # The export predicts the validation images with the model and with the file.
Speed = Callable[[Config], float]  # Measures images per second of a configuration; 0 if it cannot.


@dataclass(frozen=True)
class Images:
    """Numbers of images of a data set, by split."""

    train: int
    val: int = 0
    test: int = 0

    def seconds(self, config: Config, rate: float) -> float:
        """Return the duration of training, validations and export; `rate` is trained images per second."""
        predicted = math.ceil(config.train.epochs / config.train.validate_every) * self.val
        predicted += self.test or self.val
        predicted += _EXPORT_PASSES * min(self.val, config.export.check_images)
        return (
            _REST_SECONDS + (config.train.epochs * self.train * _OVERHEAD + predicted / _FORWARD_RATIO) / rate
        )


def planned(
    config: Config, fixed: Collection[str], images: Images, processes: int, folder: str, speed: Speed
) -> Config:
    """Return the configuration with the values chosen for these data on this machine, and print them.

    Values of the keys in `fixed`, which the user set, stay. The plan is stored in `folder`, the URI of the
    run's folder; `speed` is called only without a stored plan.
    """
    if not config.train.minutes:
        return config
    settings = {"recipe": config.recipe, "minutes": config.train.minutes, "images": images.train}

    def measured() -> dict[str, Any]:
        plan, rate = choose(config, fixed, images, processes, speed)
        train, size = plan.train, plan.loader.image_size
        print(f"{images.train} images: {train.epochs} epochs at {size} pixels, batches of "
              f"{train.batch_size}, validated every {train.validate_every}")  # fmt: skip
        estimate = None
        if rate:
            estimate = round(images.seconds(plan, rate))
            minutes = max(1, round(estimate / 60))
            is_long = minutes > QUICK_MINUTES + 1 and config.train.minutes > QUICK_MINUTES
            print(f"about {minutes} minute{'s' * (minutes > 1)} at {rate:.1f} images/s on this machine"
                  + (f"; --quick for {QUICK_MINUTES}" if is_long else ""))  # fmt: skip
            if size < config.loader.image_size or train.epochs < config.train.epochs:
                print(f"train.minutes={config.train.minutes:g} allows that; =0 takes the recipe's "
                      f"{config.train.epochs} epochs at {config.loader.image_size} pixels")  # fmt: skip
        else:
            print("the speed of this machine could not be measured: no estimate of the time")
        sys.stdout.flush()
        values = {key: attrgetter(key)(plan) for key in _KEYS if key not in fixed}
        return {"chosen": values, "images_per_second": rate, "estimated_seconds": estimate}

    return _changed(config, fixed, kept(folder, "training", settings, measured).get("chosen", {}))


def kept(
    folder: str, part: str, settings: Mapping[str, Any], choose: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the plan of a run: from its folder, or chosen now and stored there.

    Other `settings` need another choice. `choose` is not called for a run that was begun without a plan.
    """
    uri = storage.join(folder, FILE)
    begun = storage.exists(storage.join(folder, "config.json"))
    plan: dict[str, dict[str, Any]] = {}
    if storage.exists(uri):
        remedy = "start a run under another name: the choices of this one are lost"
        try:
            plan = storage.read_json(uri, storage.Form(shape={"*": {}}, remedy=remedy))
        except (DamagedError, FormError):
            if begun:
                raise
    if part in plan and plan[part].get("settings") == settings:
        return plan[part]
    if part not in plan and begun:
        return {}
    record = {"settings": settings, **choose()}
    storage.write_json(uri, plan | {part: record})
    return record


_KEYS = (
    "loader.image_size", "loader.plain_epochs", "train.batch_size", "train.global_batch", "train.epochs",
    "train.validate_every",
)  # fmt: skip


def choose(
    config: Config, fixed: Collection[str], images: Images, processes: int, speed: Speed
) -> tuple[Config, float]:
    """Return a configuration for `planned`, and its images per second, 0 if they could not be measured."""
    # A batch with which an epoch has enough steps, at most the recipe's.
    train = config.train
    of_step = train.global_batch or train.batch_size * train.accumulate * processes
    enough = max(min(of_step, images.train // _STEPS), processes)
    if enough < of_step:
        smaller = {"train.batch_size": min(train.batch_size, max(1, enough // processes))}
        smaller |= {"train.global_batch": enough} if train.global_batch else {}
        config = _changed(config, fixed, smaller)
    share = min(max(math.sqrt(_REFERENCE_IMAGES / max(images.train, 1)), 1.0), 3.0)
    target = _with_epochs(config, fixed, round(config.train.epochs * share))
    size = config.loader.image_size
    stride = max(config.model.stride, 32)
    sides = sorted({max(96, round(size * part / stride) * stride) for part in _SIDE_FACTORS}, reverse=True)
    if "loader.image_size" in fixed or config.loader.sizes:
        sides = [size]
    for side in sides:
        plan = _changed(target, fixed, {"loader.image_size": side})
        rate = speed(plan)
        if not rate:
            return target, 0.0
        possible = target.train.epochs
        while possible and images.seconds(_with_epochs(plan, fixed, possible), rate) > 60 * train.minutes:
            possible -= 1
        if possible >= _MIN_EPOCHS_SHARE * target.train.epochs:
            break
    least = min(max(math.ceil(_MIN_IMAGES_SEEN / max(images.train, 1)), 1), 5)
    return _with_epochs(plan, fixed, min(max(possible, least), target.train.epochs)), rate


def _with_epochs(config: Config, fixed: Collection[str], epochs: int) -> Config:
    epochs = config.train.epochs if "train.epochs" in fixed else epochs
    share = epochs / config.train.epochs
    # At least two validations, if there are epochs for them: the best of them is exported.
    every = min(max(1, round(config.train.validate_every * share)), max(1, epochs // 2))
    plain = round(config.loader.plain_epochs * share)
    values = {"train.epochs": epochs, "train.validate_every": every, "loader.plain_epochs": plain}
    return _changed(config, fixed, values)


def _changed(config: Config, fixed: Collection[str], values: Mapping[str, Any]) -> Config:
    return with_overrides(config, {key: value for key, value in values.items() if key not in fixed})
