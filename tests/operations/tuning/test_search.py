"""The search: values, pruning, and trials that count once, with the real Optuna."""

import json
import multiprocessing
import os
import signal
from contextlib import ExitStack

import pytest

from operations.tuning import ENDED, search
from operations.tuning.search import COMPLETE, FAILED, PRUNED, RUNNING, Search, Study
from operations.tuning.space import Choices, Range
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import EXIT_RETRY, ConfigError

pytestmark = pytest.mark.usefixtures("forked_processes")

__all__ = ["bucket", "object_store_server"]

SPACE = {"train.lr": Range(1e-4, 1e-1, log=True), "loader.mosaic": Choices([0.0, 0.5])}
WHAT = Search("debug", {"train.epochs": 4}, SPACE, "/shards")


class Fake:
    """A training of four validations, one a look; the nearer its learning rate is to 0.01, the better."""

    def __init__(self, trial, code=0):
        self.score = 1 - abs(trial.params["train.lr"] - 0.01) * 9
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


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.001)


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path / "study")
    request.getfixturevalue("bucket")
    return f"s3://bucket/tuning/{tmp_path.name}"


def run(place, trials, start=lambda trial, stack: Fake(trial), parallel=2):
    study = Study(place, WHAT, trials)
    search.train(study, range(trials), parallel, start, lambda line: None)
    return study


def test_good_values_are_found_and_bad_trials_end_early(tmp_path):
    trials = (study := run(str(tmp_path), 24)).trials()
    states = [trial.state for trial in trials]
    assert [trial.number for trial in trials] == [*range(24)]
    assert states.count(PRUNED) > 3 and COMPLETE in states
    assert study.best().value > 0.7
    pruned = [trial for trial in trials if trial.state == PRUNED]
    assert sum(len(trial.validations) < 4 for trial in pruned) > 2
    assert all(trial.value == trial.validations[-1] for trial in pruned)


def test_more_trials_continue_a_search_with_other_values(tmp_path):
    first = [trial.params for trial in run(str(tmp_path), 4).trials()]
    trials = run(str(tmp_path), 6).trials()
    assert [trial.params for trial in trials[:4]] == first
    assert len({trial.params["train.lr"] for trial in trials}) == 6


class Killed(BaseException):
    pass


def test_a_killed_trial_is_begun_again_with_its_values_and_counted_once(place):
    begun = []

    def killed(trial, stack):
        begun.append(trial)
        if trial.number == 2:
            raise Killed
        return Fake(trial)

    with pytest.raises(Killed):
        run(place, 5, killed, parallel=1)
    assert [trial.number for trial in begun] == [0, 1, 2]
    params = begun.pop().params
    trials = run(place, 5, lambda trial, stack: begun.append(trial) or Fake(trial), parallel=1).trials()
    assert [trial.number for trial in begun] == [0, 1, 2, 3, 4]
    assert trials[2].params == params
    assert RUNNING not in {trial.state for trial in trials}


def test_failed_trials_count_and_a_search_ends_when_all_have_ended(tmp_path):
    place = str(tmp_path)
    study = run(place, 3, lambda trial, stack: Fake(trial, code=int(trial.number == 0)), parallel=1)
    assert [trial.state == FAILED for trial in study.trials()] == [True, False, False]
    assert search.finish(study) == study.best()
    ended = storage.join(place, ENDED)
    Study(place, WHAT, 3)
    assert storage.exists(ended)
    Study(place, WHAT, 4)
    assert not storage.exists(ended)


def test_another_search_of_the_same_name_is_refused(tmp_path):
    run(str(tmp_path), 1)
    with pytest.raises(ConfigError, match="another overrides"):
        Study(str(tmp_path), Search("debug", {}, SPACE, "/shards"), 1)


def test_in_a_bucket_values_follow_from_seed_and_number(bucket):
    place = "s3://bucket/tuning/seeded"
    with ExitStack() as stack:
        (first, again) = (Study(place, WHAT, 4).begin(3, stack).params for _ in range(2))
        assert first == again != Study(place, WHAT, 4).begin(2, stack).params
    run(place, 4)
    trials = run(place, 8).trials()
    assert {trial.state for trial in trials} == {COMPLETE}  # Nothing is pruned.
    assert trials[3].params == first and trials[3].validations
    assert len({trial.params["train.lr"] for trial in trials}) == 8


class Endless(Fake):
    """A training that is not over when its search is killed."""

    def poll(self):
        return None


def search_in(place, begun, kind):
    """What a process of its own does; it tells which trials it begins."""
    search.train(
        Study(place, WHAT, 6), range(6), 2,
        lambda trial, stack: begun.put((kind.__name__, trial.number)) or kind(trial), lambda line: None,
    )  # fmt: skip


def test_searches_share_a_study_and_take_up_what_a_killed_one_leaves(tmp_path):
    place, forked = str(tmp_path / "study"), multiprocessing.get_context("fork")
    begun = forked.Queue()
    killed = forked.Process(target=search_in, args=(place, begun, Endless))
    killed.start()
    first = [begun.get(timeout=60) for _ in range(2)]
    other = forked.Process(target=search_in, args=(place, begun, Fake))
    other.start()
    first.append(begun.get(timeout=60))  # It works while the one that is then killed does.
    os.kill(killed.pid, signal.SIGKILL)
    for one in (killed, other):
        one.join(60)
    assert other.exitcode == 0
    rest = [begun.get(timeout=60) for _ in range(5)]
    assert sorted(first + rest) == sorted(
        [("Endless", 0), ("Endless", 1), *(("Fake", number) for number in range(6))]
    )
    assert RUNNING not in {trial.state for trial in Study(place, WHAT, 6).trials()}


@pytest.mark.slow
@pytest.mark.extra
def test_two_trials_are_trained_on_the_same_shards(tmp_path, shards):
    overrides = {
        "train.epochs": 2, "train.validate_every": 1, "loader.image_size": 96,
        "model.backbone_width": 8, "train.batch_size": 8,
    }  # fmt: skip
    searched = Search("debug", overrides, {"train.lr": Range(1e-3, 1e-2)}, shards)

    def start(trial, stack: ExitStack):
        folder = tmp_path / str(trial.number)
        folder.mkdir()
        return search.LocalTraining(searched, trial, str(folder), stack, parallel=2, log=folder / "log.txt")

    study = Study(str(tmp_path / "study"), searched, 2)
    before = sorted(os.listdir(shards))
    search.train(study, range(2), 2, start, lambda line: None)
    for trial in study.trials():
        used = json.loads((tmp_path / str(trial.number) / "config.json").read_text())
        assert used["train"]["lr"] == trial.params["train.lr"]
        assert trial.validations and trial.state in (COMPLETE, PRUNED)
    assert study.best().value == max(study.best().validations)
    assert sorted(os.listdir(shards)) == before
