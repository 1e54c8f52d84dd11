"""The schedule of a training, its time limit and what it resumes from."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from finished_runs import stopped_after

from trainer.base.errors import ConfigError, StorageError
from trainer.config.parsing import to_json
from trainer.config.schema import Config, TrainConfig
from trainer.launching.distributed import SINGLE, World
from trainer.model import recipes
from trainer.trackers.training_log import read_rows
from trainer.training import checkpoint, loop, schedule
from trainer.training.optim import learning_rate
from trainer.training.schedule import Schedule
from trainer.training.state import TrainState
from trainer.training.step import TrainStep

IMAGES, BATCH = 10, 4
SECOND = World(rank=1, size=2, device=torch.device("cpu"))


def after(step, *, validated=0, **options):
    """The schedule of two and a half steps an epoch, after so many steps."""
    config = dataclasses.replace(TrainConfig(epochs=3), **options)
    state = SimpleNamespace(step=step, samples=step * BATCH, validated=validated, world=SINGLE)
    return Schedule(Config(train=config), IMAGES, BATCH, state)


def steps_where(method, **options):
    return [step for step in range(9) if getattr(after(step, **options), method)()]


def validated_steps(**options):
    """The steps after which a training validates."""
    validated = 0
    for step in range(9):
        if after(step, validated=validated, **options).validation_due():
            validated = step
            yield step


def test_epochs_and_validations():
    assert [after(step).epoch for step in range(9)] == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert steps_where("epoch_ended") == [3, 5, 8]
    assert list(validated_steps()) == [3, 5, 8]
    assert list(validated_steps(validate_every=2)) == [5, 8]


def test_checkpoints_within_an_epoch():
    now = time.monotonic()
    assert after(4, checkpoint_steps=2).checkpoint_due(now)
    assert not after(5, checkpoint_steps=2).checkpoint_due(now)
    assert not after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now)
    assert after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601)
    assert not after(5, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601), "it costs a message"
    assert not after(4, checkpoint_minutes=0, log_every=4).checkpoint_due(now - 601)


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Training:
    """The steps and validations of a training, without a detector."""

    def __init__(self, clock, config, images=300, batch=4, state=None, seconds=0.0):
        self.clock, self.batch, self.config = clock, batch, config
        self.state = state or SimpleNamespace(step=0, samples=0, validated=0, world=SINGLE)
        self.schedule = Schedule(config, images, batch, self.state, seconds=seconds)
        self.rates, self.plain, self.validations = [], [], []

    def run(self, step_seconds, *, validation=0.0, stop=10**9):
        """Train with steps of so many seconds, by the share of time that has passed; return the seconds."""
        start = self.clock.now
        while not self.schedule.ended and self.state.step < stop:
            position = self.schedule.position, self.schedule.steps
            self.rates.append(learning_rate(*position, self.config.train) / self.config.train.lr)
            self.clock.now += step_seconds(self.clock.now / 60 / (self.config.train.minutes or 1))
            agreed = self.schedule.measure_elapsed_share()
            self.state.step += 1
            self.state.samples += self.batch
            self.schedule.advance()
            self.schedule.set_elapsed_share(agreed)  # It is known one step later.
            self.plain.append(self.schedule.first_plain_epoch())
            if self.schedule.validation_due():
                self.clock.now += validation
                self.validations.append(self.state.step)
                self.schedule.mark_validated()
        return self.clock.now - start


SPEEDS = {
    "fast": lambda share: 0.2,
    "slow": lambda share: 3.0,
    "slower": lambda share: 0.2 if share < 0.5 else 1.0,
    "faster": lambda share: 1.0 if share < 0.3 else 0.2,
    "varying": lambda share: 0.3 if int(20 * share) % 2 else 0.9,
}


@pytest.mark.parametrize("minutes", [2, 8])
@pytest.mark.parametrize("speed", SPEEDS)
def test_the_schedule_ends_with_the_time(speed, minutes, clock):
    config = recipes.load("small", {"train.minutes": minutes, "loader.plain_epochs": 9})
    training = Training(clock, config)
    taken = training.run(SPEEDS[speed], validation=2.0)
    assert 0.99 * 60 * minutes <= taken < 60 * minutes + 12
    assert training.state.step < training.schedule.steps
    assert training.rates[-1] < 0.05 and len(training.validations) in (5, 6)
    assert training.state.validated == training.state.step
    assert max(training.rates) > 0.9 and training.rates[0] < 0.1, "it warms up first"
    if speed in ("fast", "varying") and training.schedule.epoch > 4:
        assert 0.1 < 1 - training.plain[-1] / training.schedule.epoch < 0.4, "a fifth of the epochs is plain"


def test_a_fast_machine_trains_as_without_a_limit(clock):
    unlimited, limited = (
        Training(clock, recipes.load("debug", {"train.minutes": minutes, "loader.plain_epochs": 4}))
        for minutes in (0, 3)
    )
    unlimited.run(lambda share: 1000.0)
    limited.run(lambda share: 0.07)
    assert limited.state == unlimited.state and limited.state.step == limited.schedule.steps == 2250
    assert limited.rates == unlimited.rates and limited.validations == unlimited.validations == [
        750,
        1500,
        2250,
    ]
    assert set(unlimited.plain) == {-1} and set(limited.plain) <= {-1, 26}


def test_a_slow_first_step_does_not_count(clock):
    """The first step compiles, or chooses kernels."""
    config = recipes.load("debug", {"train.minutes": 2})
    training = Training(clock, config, images=480)
    training.run(lambda share: 60.0, stop=1)
    assert training.run(lambda share: 0.2) == pytest.approx(120, abs=1)
    assert training.rates[1] < 0.1


def test_a_resumed_training_has_the_time_that_is_left(clock):
    config = recipes.load("small", {"train.minutes": 4})
    first = Training(clock, config)
    first.run(lambda share: 0.5, stop=100)
    seconds = first.schedule.seconds
    clock.now += 1000
    again = Training(clock, config, state=first.state, seconds=seconds)
    assert again.schedule.position == pytest.approx(first.schedule.position, rel=0.02)
    assert again.run(lambda share: 0.5) == pytest.approx(240 - seconds, abs=2)
    finished = Training(clock, config, state=first.state, seconds=again.schedule.seconds)
    assert finished.schedule.ended and not finished.schedule.validation_due()
    longer = recipes.load("small", {"train.minutes": 8})
    more = Training(clock, longer, state=first.state, seconds=again.schedule.seconds)
    assert more.run(lambda share: 0.5) == pytest.approx(240, abs=2)


@pytest.mark.slow
def test_a_training_ends_at_its_time_limit_and_resumes(clock, shards, tiny, tmp_path, monkeypatch):
    step = TrainStep.__call__

    def slower(self, batches, **options):
        clock.now += 2.0
        return step(self, batches, **options)

    monkeypatch.setattr(TrainStep, "__call__", slower)
    config = tiny(train__epochs=20, train__minutes=1.0, train__validate_every=4, loader__plain_epochs=5)
    output = str(tmp_path / "run")
    with stopped_after(10):
        loop.train(config, shards, output)
    result = loop.train(config, shards, output)
    rows = read_rows(output)
    assert 10 <= result["resumed_from"] <= 12 and 30 <= result["steps"] <= 33
    validated = [row["step"] for row in rows if row["kind"] == "val"]
    assert len(validated) >= 5 and validated[-1] == result["steps"]
    assert rows[-2]["lr"] < 0.1 * config.train.lr


def test_every_rank_reads_the_checkpoint_of_rank_0(tmp_path, monkeypatch):
    for step in (6, 9):
        state = {"step": step, "model": {}, "global_batch": 8, "config": "{}"}
        checkpoint.write_step(state, str(tmp_path), step, keep=2)
    assert loop.newest_checkpoint(str(tmp_path), SINGLE)["step"] == 9
    # This machine already sees a newer file than rank 0.
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 6)
    assert loop.newest_checkpoint(str(tmp_path), SECOND)["step"] == 6
    monkeypatch.setattr(loop, "broadcast", lambda value, world: None)
    assert loop.newest_checkpoint(str(tmp_path), SECOND) is None
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 12)
    with pytest.raises(StorageError, match=r"step-00000012\.pt"):
        loop.newest_checkpoint(str(tmp_path), SECOND)


def test_a_folder_that_cannot_be_listed_does_not_start_a_new_run():
    with pytest.raises(StorageError):
        loop.newest_checkpoint("https://127.0.0.1:1/run", SINGLE)


def test_the_global_batch_is_kept_on_other_processes(tiny):
    config = tiny(train__batch_size=4)
    saved = {"config": to_json(config), "global_batch": 8}
    assert loop.choose_global_batch(config, None, 24, SINGLE) == 4
    assert loop.choose_global_batch(config, saved, 24, SINGLE) == 8
    assert loop.choose_global_batch(tiny(train__batch_size=3), saved, 24, SINGLE) == 3, "the user set another"
    assert loop.choose_global_batch(tiny(train__global_batch=6), saved, 24, SINGLE) == 6
    with pytest.raises(ConfigError, match="1 images cannot be split among 2 processes"):
        loop.choose_global_batch(tiny(train__global_batch=1), saved, 24, SECOND)


def test_an_additional_rank_has_other_random_numbers(tiny):
    before = TrainState(tiny(), 2, SINGLE)
    before.step, before.samples = 5, 40
    saved = before.state_dict()
    torch.manual_seed(1)
    known = TrainState(tiny(), 2, SINGLE)
    known.load_state_dict(saved)
    assert known.samples == 40 and torch.equal(torch.get_rng_state(), saved["random"][0]["cpu"])

    def numbers(rank, step=5):
        state = TrainState(tiny(), 2, World(rank, 4, torch.device("cpu")))
        state.load_state_dict({**saved, "step": step})
        return torch.rand(8)

    assert torch.equal(numbers(1), numbers(1)), "reproducible"
    drawn = [numbers(1), numbers(2), numbers(1, step=6)]
    fresh = torch.rand(8, generator=torch.Generator().manual_seed(tiny().train.seed + 2))
    assert not any(torch.equal(one, fresh) for one in drawn)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
