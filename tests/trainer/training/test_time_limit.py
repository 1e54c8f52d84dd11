"""A training ends within train.minutes, whatever the machine does, and the same however it was stopped."""

import dataclasses
from types import SimpleNamespace

import pytest
from finished_runs import train_in_parts

from trainer.launching.distributed import SINGLE
from trainer.model import recipes
from trainer.trackers.training_log import read_rows
from trainer.training import loop, time_limit
from trainer.training.loop import CheckpointSchedule
from trainer.training.optim import learning_rate
from trainer.training.step import TrainStep
from trainer.training.time_limit import SplitSizes, TimeLimit

SIZES, BATCH = SplitSizes(300, 60, 30), 4


class Clock:
    """Seconds that only pass when the test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time_limit, "clock", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize(("minutes", "startup"), [(4, 0), (8, 20), (30, 0)])
@pytest.mark.parametrize(
    "step_seconds",
    [
        lambda share: 0.2,
        lambda share: 3.0,
        lambda share: 0.2 if share < 0.5 else 1.0,  # Others take the machine,
        lambda share: 1.0 if share < 0.3 else 0.2,  # or leave it.
        lambda share: 0.3 if int(20 * share) % 2 else 0.9,
    ],
)
def test_a_machine_of_any_speed_ends_in_time_at_a_low_learning_rate(
    step_seconds, minutes, startup, clock, monkeypatch
):
    """`startup`: seconds to start a process. What follows the training takes 4.5 of them."""
    monkeypatch.setattr(time_limit, "seconds_since_start", lambda: startup)
    config = recipes.load("small", {"train.minutes": minutes, "loader.plain_epochs": 4})
    limit = TimeLimit(config, SIZES, BATCH)
    predicted = 0.02 * (SIZES.test + 2 * SIZES.val)  # seconds
    state = SimpleNamespace(step=0, samples=0, validated=0)
    schedule, validations, nominal = CheckpointSchedule(config.train, state, limit), [], limit.pace.nominal
    while state.step < limit.pace.end:
        seconds = step_seconds(clock.now / 60 / minutes)
        clock.now += seconds + (10 if state.step == 0 else 0)
        state.step += 1
        state.samples += BATCH
        limit.check(state.step, SINGLE)
        if schedule.validation_due():
            validations.append(schedule.epoch)
            state.validated = state.step
            with limit.validation():
                clock.now += SIZES.val * seconds / BATCH / 3
    pace, taken = limit.pace, startup + clock.now + max(30, 4.5 * startup) + predicted
    assert taken < 1.1 * 60 * minutes
    assert pace.end == nominal or taken > 0.8 * 60 * minutes
    assert state.validated == state.step and len(validations) <= 12
    last = learning_rate(pace.at(state.step - 1), nominal, config.train)
    assert last < 0.05 * config.train.lr
    if 400 < pace.end < nominal:
        assert len(validations) > 2
        assert validations[-1] - 4 <= pace.plain_from <= validations[-1], "plain epochs at the end"


def test_slow_first_steps_do_not_end_a_training(clock, monkeypatch):
    """As measured on a busy node, where the training of debug ended after two steps."""
    monkeypatch.setattr(time_limit, "seconds_since_start", lambda: 18)
    limit = TimeLimit(recipes.load("debug", {"train.minutes": 2.5}), SplitSizes(480, 80, 80), 4)
    step = 0
    while step < limit.pace.end:
        clock.now += 10 if step == 0 else 4 if step < 3 else 0.2
        step += 1
        limit.check(step, SINGLE)
    assert step > 100 and 18 + clock.now < 150 - 30


def test_a_schedule_without_a_limit_is_that_of_the_recipe(clock):
    limit = TimeLimit(recipes.load("small", {"train.epochs": 7}), SIZES, BATCH)
    assert limit.pace.end == limit.pace.nominal == 525
    for step in range(526):
        clock.now += 1000
        limit.check(step, SINGLE)
        assert limit.pace.at(step) == step


def test_another_limit_takes_up_the_measured_speed_and_the_time_that_is_left(clock):
    config = recipes.load("small", {"train.minutes": 4})
    first = TimeLimit(config, SIZES, BATCH)
    for step in range(1, 101):
        clock.now += 0.5
        first.check(step, SINGLE)
    saved, short = first.state_dict(), first.pace.end
    assert 300 < short < first.pace.nominal
    clock.now += 1000
    assert TimeLimit(config, SIZES, BATCH, saved).pace.end == short
    longer = TimeLimit(recipes.load("small", {"train.minutes": 8}), SIZES, BATCH, saved)
    longer.begin()
    for step in range(101, 200):
        clock.now += 0.5
        longer.check(step, SINGLE)
    assert 2 * short < longer.pace.end < 480 / 0.5


@pytest.mark.slow
def test_a_slow_machine_ends_early_and_resumes_bit_for_bit(clock, shards, tiny, tmp_path, monkeypatch):
    step, predict = TrainStep.__call__, loop.predict_split

    def slower(self, batches, **options):
        done = step(self, batches, **options)
        clock.now += 1.0 if self._state.step < 8 else 3.0
        return done

    def predicting(*given, **options):
        clock.now += 2.0
        return predict(*given, **options)

    monkeypatch.setattr(TrainStep, "__call__", slower)
    monkeypatch.setattr(loop, "predict_split", predicting)
    config = tiny(train__epochs=20, train__minutes=1.0, train__validate_every=4, loader__plain_epochs=5)
    config = dataclasses.replace(config, loader=dataclasses.replace(config.loader, mosaic=0.5, prefetch=2))
    train_in_parts(config, shards, str(tmp_path), stop=10)
    rows = read_rows(str(tmp_path / "parts"))
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert 12 < steps[-1] < 30 < 120, "30 seconds are kept for evaluation and export"
    assert [row["step"] for row in rows if row["kind"] == "val"][-1] == steps[-1]
    assert rows[-2]["lr"] < 0.1 * config.train.lr
