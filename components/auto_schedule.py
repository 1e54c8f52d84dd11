"""Chooses epochs, image size, batch and validations by the number of images and the measured speed."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from trainer import storage
from trainer.base.errors import DamagedError, FormError
from trainer.base.log import clock
from trainer.base.worker_pool import threads_of_process
from trainer.config.parsing import to_json, with_overrides
from trainer.config.schema import MINUTES, QUICK_MINUTES, Config
from trainer.training.time_limit import SplitSizes, seconds_since_start

FILE = "plan.json"  # In the run's folder: the settings and the values chosen for them.
_REFERENCE_IMAGES = 300  # Images that a recipe's epochs are for; fewer get up to three times as many.
_STEPS = 10  # Steps that an epoch should have, if a smaller batch makes that possible.
_SIDE_FACTORS = (1.0, 0.8, 0.6)  # Image sizes that are tried, relative to the recipe's.
_MIN_SIDE = 128  # No image size is reduced below it.
_MIN_EPOCHS_SHARE = 0.6  # A larger image is preferred if there is time for this share of the epochs.
_MAX_SHARE_BEFORE = 0.25  # Share of the limit that the steps before the training use at most.
_OVERHEAD = 1.2  # Duration of a training relative to its passes: loading, the optimizer, writing.
Speed = Callable[[Config], float]  # Measures images per second of a configuration; 0 if it cannot.


def planned(
    config: Config, fixed: Collection[str], images: SplitSizes, processes: int, folder: str, speed: Speed
) -> Config:
    """Return the configuration for these data and this machine; keys in `fixed`, which the user set, stay."""
    if not config.train.minutes:
        return config
    settings = {"recipe": config.recipe, "minutes": config.train.minutes, "images": images.train}

    def measured() -> dict[str, Any]:
        start, minutes = time.monotonic(), config.train.minutes
        before = min(seconds_since_start(), _MAX_SHARE_BEFORE * 60 * minutes)
        plan, rate = choose(config, fixed, images, processes, speed)
        train, seconds = plan.train, _seconds(plan, images, rate) if rate else math.inf
        shown = f"{train.epochs} epochs at {plan.loader.image_size} pixels, batches of {train.batch_size}"
        print(f"{images.train} images: up to {shown}")
        quick = f"; --quick for {QUICK_MINUTES} minutes" if minutes > QUICK_MINUTES else ""
        if seconds <= 60 * minutes:
            print(f"about {clock(seconds)} at {rate:.1f} images/s", flush=True)
        else:
            print(f"as many as fit into {minutes:g} minutes{quick}", flush=True)
        values = {key: attrgetter(key)(plan) for key in _KEYS if key not in fixed}
        left = round(minutes - (before + time.monotonic() - start) / 60, 2)
        return {"chosen": values, "images_per_second": rate, "minutes": left}

    plan = kept(folder, "training", settings, measured)
    config = _changed(config, fixed, plan.get("chosen", {}))
    return with_overrides(config, {MINUTES: plan.get("minutes", config.train.minutes)})


def kept(
    folder: str, part: str, settings: Mapping[str, Any], choose: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the plan of a run for these settings: from its folder, or chosen now and stored there."""
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
    config: Config, fixed: Collection[str], images: SplitSizes, processes: int, speed: Speed
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
    share = 1.0 if "train.epochs" in fixed else round(train.epochs * share) / train.epochs
    longer = {
        "train.epochs": round(train.epochs * share),
        "loader.plain_epochs": round(config.loader.plain_epochs * share),
        "train.validate_every": max(1, round(train.validate_every * share)),
    }
    target = _changed(config, fixed, longer)
    size, stride = config.loader.image_size, max(config.model.stride, 32)
    sides = {max(_MIN_SIDE, round(size * part / stride) * stride) for part in _SIDE_FACTORS}
    if "loader.image_size" in fixed or config.loader.sizes or len(sides) == 1:
        return target, 0.0
    print("measuring the speed of this machine", flush=True)
    rate = speed(target)
    for side in sorted(sides, reverse=True):
        plan = _changed(target, fixed, {"loader.image_size": side})
        at_side = rate * (size / side) ** 2
        if rate and _MIN_EPOCHS_SHARE * _seconds(plan, images, at_side) <= 60 * train.minutes:
            break
    return plan, at_side


def _seconds(config: Config, images: SplitSizes, rate: float) -> float:
    """Return the duration of all epochs, validations, evaluation and export at `rate` images per second."""
    train = config.train
    passes = train.epochs * images.train * _OVERHEAD / rate
    validations = math.ceil(train.epochs / train.validate_every) * images.validation_seconds(rate)
    return passes + validations + images.seconds_after(config, rate)


def _changed(config: Config, fixed: Collection[str], values: Mapping[str, Any]) -> Config:
    return with_overrides(config, {key: value for key, value in values.items() if key not in fixed})


def measure(config: Config, classes: int, processes: int, timeout: float) -> float:
    """Return images per second of processes that train on this machine at the same time.

    It is 0 on failure, and after `timeout` seconds without a result.
    """
    request = json.dumps({"config": to_json(config), "classes": classes})
    env = {"OMP_NUM_THREADS": str(threads_of_process(processes)), **os.environ}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.training.throughput_probe", request],
            env={**env, "LOCAL_RANK": str(rank)},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]
    try:
        end = time.monotonic() + timeout
        rates = [float(one.communicate(timeout=end - time.monotonic())[0].split()[-1]) for one in started]
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 0.0
    finally:
        for process in started:
            process.kill()
            process.wait()
    return sum(rates) if all(rates) else 0.0
