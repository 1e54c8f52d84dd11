"""The search: what is drawn, what is ended early, and that no trial counts twice. Optuna is real."""

import json
import multiprocessing
import os
import signal
from contextlib import ExitStack

import pytest

from components.tuning import search
from components.tuning.study import COMPLETE, FAILED, PRUNED, Search, Study
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted, TrainingError

__all__ = ["bucket", "object_store_server"]

SPACE = {
    "train.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "loader.mosaic": {"choices": [0.0, 0.5]},
}
LAPSE = 1.5
"""Seconds: a store that answers slowly on a busy machine must not look like a lost process."""
WHAT = Search("debug", {"train.epochs": 4}, SPACE, "/shards")


class Fake:
    """A training of four validations, one a look; the nearer its learning rate is to 0.01, the better."""

    def __init__(self, record, code=0):
        self.score = 1 - abs(record.params["train.lr"] - 0.01) * 9
        self.code, self.seen, self.stopped = code, 0, False

    def poll(self):
        if self.stopped or self.code:
            return self.code or EXIT_RETRY
        self.seen += 1
        return None if self.seen <= 4 else 0

    def validations(self):
        return [self.score * part / 4 for part in range(1, min(self.seen, 4) + 1)]

    def result(self):
        return self.score

    def stop(self):
        self.stopped = True

    def wait(self):
        return self.code


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(search, "_POLL", 0.001)


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "study")


def run(place, trials, start=lambda record, stack: Fake(record), parallel=2):
    study = Study(place, WHAT, trials, lapse=LAPSE)
    search.train(study, range(trials), parallel, start, lambda line: None)
    return study


def written(place):
    names = storage.list_files(storage.join(place, "trials"))
    return [storage.read_json(storage.join(place, "trials", name)) for name in names]


def test_good_values_are_found_and_bad_trials_end_early(place):
    study = run(place, 24)
    states = [record.state for record in study.records]
    assert len(states) == 24
    assert states.count(PRUNED) > 3
    assert states.count(COMPLETE) > 3
    assert study.best().value > 0.95
    lengths = [len(record.validations) for record in study.records if record.state == PRUNED]
    assert sum(length < 4 for length in lengths) > 3
    assert min(record.value for record in study.records if record.state == COMPLETE) > 0
    assert next(iter(study.importances())) == "train.lr"


def test_a_second_call_goes_on_and_draws_other_values(place):
    first = [record.params for record in run(place, 4).records]
    study = run(place, 6)
    assert [record.params for record in study.records[:4]] == first
    assert len({record.params["train.lr"] for record in study.records}) == 6
    assert [record.number for record in study.records] == [*range(6)]


class Killed(BaseException):
    """Ends the process of the search without a word."""


def test_a_killed_trial_is_begun_again_and_counted_once(place):
    def killed(record, stack):
        if record.number == 2:
            raise Killed
        return Fake(record)

    with pytest.raises(Killed):
        run(place, 5, killed, parallel=1)
    before = written(place)
    assert [tree["state"] == "running" for tree in before] == [False, False, True]
    begun = []

    def start(record, stack):
        begun.append(record.number)
        return Fake(record)

    study = run(place, 5, start, parallel=1)
    assert begun == [2, 3, 4]
    assert study.records[2].params == before[2]["params"]
    assert [record.attempts for record in study.records] == [1, 1, 2, 1, 1]
    assert len(written(place)) == 5
    assert "running" not in {tree["state"] for tree in written(place)}


def test_a_training_that_was_stopped_by_another_stays_unfinished(place):
    with pytest.raises(Interrupted, match="trial 0"):
        run(place, 2, lambda record, stack: Fake(record, EXIT_RETRY), parallel=1)
    assert [tree["state"] for tree in written(place)] == ["running"]


def test_failed_trials_count_and_the_rest_goes_on(place):
    study = run(place, 3, lambda record, stack: Fake(record, code=int(record.number == 0)), parallel=1)
    assert [record.state == FAILED for record in study.records] == [True, False, False]


def test_it_is_an_error_where_no_trial_comes_to_a_result(place):
    study = run(place, 2, lambda record, stack: Fake(record, code=1))
    with pytest.raises(TrainingError, match="none of 2 trials"):
        search.best(study)


def test_another_search_of_the_same_name_is_refused(place):
    run(place, 1)
    with pytest.raises(ConfigError, match="another overrides"):
        Study(place, Search("debug", {}, SPACE, "/shards"), 1)


def test_a_trial_belongs_to_one_process_at_a_time(place):
    with ExitStack() as first, ExitStack() as second:
        one, other = Study(place, WHAT, 4, lapse=LAPSE), Study(place, WHAT, 4, lapse=LAPSE)
        taken = [one.take(range(2), first), other.take(range(2), second)]
        assert [record.number for record in taken] == [0, 1]
        assert other.take(range(2), second) is None
        assert taken[0].params != taken[1].params
    # Let go of, both are unfinished, and either process may go on with both.
    with ExitStack() as stack:
        again = Study(place, WHAT, 4, lapse=LAPSE)
        assert [again.take(range(4), stack).number for _ in range(3)] == [0, 1, 2]
        assert [record.attempts for record in again.records] == [2, 2, 1]


def test_whoever_can_only_wait_says_so(place):
    def shown(line):
        raise Killed(line)

    with ExitStack() as stack:
        Study(place, WHAT, 1, lapse=60).take([0], stack)
        with pytest.raises(Killed, match="waiting for trials of another process; if it was killed, 60 s"):
            search.train(Study(place, WHAT, 1, lapse=60), [0], 1, lambda record, stack: Fake(record), shown)


def test_running_trials_of_others_count_when_values_are_drawn_and_trials_are_ended(place):
    with ExitStack() as stack:
        one, other = Study(place, WHAT, 2, lapse=LAPSE), Study(place, WHAT, 2, lapse=LAPSE)
        good, bad = one.take([0], stack), other.take([1], stack)
        assert not one.report(good, 0.9)
        assert other.report(bad, 0.1)
        assert [record.state for record in other.records] == ["running", "running"]
        known = other._optuna().get_trials()
        assert [trial.params for trial in known] == [good.params, bad.params]
        assert [trial.state.name for trial in known] == ["RUNNING", "RUNNING"]


class Endless(Fake):
    """A training that is not over when its search is killed."""

    def poll(self):
        return None


def search_in(place, begun, kind):
    """What a process of its own does; it tells which trials it begins."""

    def start(record, stack):
        begun.put((kind.__name__, record.number))
        return kind(record)

    study = Study(place, WHAT, 6, lapse=LAPSE)
    search.train(study, range(6), 2, start, lambda line: None)


def test_searches_share_a_study_and_take_up_what_a_killed_one_leaves(place):
    forked = multiprocessing.get_context("fork")
    begun = forked.Queue()
    killed = forked.Process(target=search_in, args=(place, begun, Endless))
    killed.start()
    first = [begun.get(timeout=60) for _ in range(2)]
    others = [forked.Process(target=search_in, args=(place, begun, Fake)) for _ in range(2)]
    for one in others:
        one.start()
    first.append(begun.get(timeout=60))  # They work while the one that is then killed does.
    os.kill(killed.pid, signal.SIGKILL)
    for one in (killed, *others):
        one.join(60)
    assert [one.exitcode for one in others] == [0, 0]
    rest = [begun.get(timeout=60) for _ in range(5)]
    assert sorted(first + rest) == sorted(
        [("Endless", 0), ("Endless", 1), *(("Fake", number) for number in range(6))]
    )
    trials = written(place)
    assert [tree["attempts"] for tree in trials] == [2, 2, 1, 1, 1, 1]
    assert "running" not in {tree["state"] for tree in trials}


def test_the_study_may_be_in_an_object_store(bucket):
    study = run("s3://bucket/tuning/first", 3)
    assert len(written("s3://bucket/tuning/first")) == 3
    again = run("s3://bucket/tuning/first", 4)
    assert [record.params for record in again.records[:3]] == [record.params for record in study.records]


@pytest.mark.slow
def test_three_trials_are_trained_on_the_same_shards(tmp_path, shards):
    overrides = {
        "train.epochs": 2, "train.validate_every": 1, "loader.image_size": 96,
        "model.backbone_width": 8, "train.batch_size": 8,
    }  # fmt: skip
    searched = Search("debug", overrides, {"train.lr": {"low": 1e-3, "high": 1e-2}}, shards)

    def start(record, stack: ExitStack):
        folder = tmp_path / str(record.number)
        folder.mkdir()
        return search.LocalTraining(searched, record, str(folder), stack, parallel=3, log=folder / "log.txt")

    study = Study(str(tmp_path / "study"), searched, 3)
    before = sorted(os.listdir(shards))
    search.train(study, range(3), 3, start, lambda line: None)
    assert {record.state for record in study.records} <= {COMPLETE, PRUNED}
    for record in study.records:
        used = json.loads((tmp_path / str(record.number) / "config.json").read_text())
        assert used["train"]["lr"] == record.params["train.lr"]
        assert record.validations
    assert study.best().value == max(study.best().validations)
    assert sorted(os.listdir(shards)) == before
