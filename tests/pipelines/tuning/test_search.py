"""The search: what is drawn, what is ended early, and that no trial counts twice. Optuna is real."""

import json
import os
from contextlib import ExitStack

import pytest

from pipelines.tuning import search
from pipelines.tuning.study import COMPLETE, FAILED, PRUNED, Search, Study
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.errors import EXIT_RETRY, ConfigError, Interrupted, TrainingError

__all__ = ["bucket", "object_store_server"]

SPACE = {
    "train.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "loader.mosaic": {"choices": [0.0, 0.5]},
}
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
    monkeypatch.setattr(search, "_POLL", 0)


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "study")


def run(place, trials, start=lambda record, stack: Fake(record), parallel=2):
    study = Study(place, WHAT, trials)
    search.run(study, trials, parallel, start, lambda line: None)
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
    assert max(len(record.validations) for record in study.records if record.state == PRUNED) < 4
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
    assert len(study.optuna.trials) == len(written(place)) == 5
    assert "running" not in {tree["state"] for tree in written(place)}


def test_a_training_that_was_stopped_by_another_stays_unfinished(place):
    with pytest.raises(Interrupted, match="trial 0"):
        run(place, 2, lambda record, stack: Fake(record, EXIT_RETRY), parallel=1)
    assert [tree["state"] for tree in written(place)] == ["running"]


def test_failed_trials_count_and_the_rest_goes_on(place):
    study = run(place, 3, lambda record, stack: Fake(record, code=int(record.number == 0)), parallel=1)
    assert [record.state == FAILED for record in study.records] == [True, False, False]


def test_it_is_an_error_where_no_trial_comes_to_a_result(place):
    with pytest.raises(TrainingError, match="none of 2 trials"):
        run(place, 2, lambda record, stack: Fake(record, code=1))


def test_another_search_of_the_same_name_is_refused(place):
    run(place, 1)
    with pytest.raises(ConfigError, match="another overrides"):
        Study(place, Search("debug", {}, SPACE, "/shards"), 1)


def test_two_processes_do_not_both_begin_a_trial(place):
    one, other = Study(place, WHAT, 4), Study(place, WHAT, 4)
    one.ask()
    with pytest.raises(ConfigError, match="another process has begun trial 0"):
        other.ask()


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
        return search.LocalTraining(searched, record, folder, 3, stack)

    study = Study(str(tmp_path / "study"), searched, 3)
    before = sorted(os.listdir(shards))
    search.run(study, 3, 3, start, lambda line: None)
    assert {record.state for record in study.records} <= {COMPLETE, PRUNED}
    for record in study.records:
        used = json.loads((tmp_path / str(record.number) / "config.json").read_text())
        assert used["train"]["lr"] == record.params["train.lr"]
        assert record.validations
    assert study.best().value == max(study.best().validations)
    assert sorted(os.listdir(shards)) == before
