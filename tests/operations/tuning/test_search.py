"""The search: values, pruning, and trials that count once, with the real Optuna."""

import json
import math
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from optuna.trial import TrialState
from scripted_training import ScriptedTraining

from components import steps
from operations.tuning import search
from operations.tuning.choice import report_best_trial
from operations.tuning.search import Study
from operations.tuning.space import ENDED_FILE
from tests.trainer.conftest import bucket, object_store_server
from trainer import storage
from trainer.base.errors import EXIT_RETRY, ConfigError, FormatError, Interrupted
from trainer.model import recipes
from trainer.steps.manifests import Shards

__all__ = ["bucket", "object_store_server"]

SPACE = "{train.lr: {low: 0.0001, high: 0.1, log: true}, loader.mosaic: {choices: [0.0, 0.5]}}"
COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING


@pytest.fixture(autouse=True)
def training(monkeypatch):
    class Fake(ScriptedTraining):
        codes, begun = {}, []

    monkeypatch.setattr(search, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(search, "GuardedProcess", Fake)
    return Fake


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path)
    request.getfixturevalue("bucket")
    return f"s3://bucket/{tmp_path.name}"


def opened(root, trials, overrides=None):
    return Study(root, "first", "debug", overrides or {"train.epochs": 4}, SPACE, "/data/shards/abc", trials)


def run(root, trials, parallel=2):
    study = opened(root, trials)
    search.train_trials(study, range(trials), parallel)
    return study


def test_good_values_are_found_and_bad_trials_end_early(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "write_results", lambda study: None)
    trials = run(str(tmp_path), 24).trials()
    states = [trial.state for trial in trials]
    assert [trial.number for trial in trials] == [*range(24)]
    assert states.count(PRUNED) > 3 and COMPLETE in states
    assert max(trial.value for trial in trials if trial.state == COMPLETE) > 0.7
    pruned = [[*trial.intermediate_values.values()] for trial in trials if trial.state == PRUNED]
    assert sum(len(validations) < 4 for validations in pruned) > 2
    assert [trial.value for trial in trials if trial.state == PRUNED] == [each[-1] for each in pruned]


def test_more_trials_continue_a_search_with_other_values(tmp_path):
    first = [trial.params for trial in run(str(tmp_path), 4).trials()]
    trials = run(str(tmp_path), 6).trials()
    assert [trial.params for trial in trials[:4]] == first
    assert len({trial.params["train.lr"] for trial in trials}) == 6


class Killed(BaseException):
    pass


def test_a_killed_trial_is_begun_again_with_its_values_and_counted_once(root, training, monkeypatch):
    def poll(process):
        if process.number == 2:
            raise Killed
        return ScriptedTraining.poll(process)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(training, "poll", poll)
        run(root, 5, parallel=1)
    assert [process.number for process in training.begun] == [0, 1, 2]
    before = training.begun.pop().config
    trials = run(root, 5, parallel=1).trials()
    assert [process.number for process in training.begun] == [0, 1, 2, 3, 4]
    assert training.begun[2].config == before
    assert {len(trial.intermediate_values) for trial in trials if trial.state == COMPLETE} == {4}
    assert all(trial.state.is_finished() for trial in trials)


def test_failed_trials_count_and_a_search_ends_when_all_have_ended(tmp_path, training):
    training.codes[0] = 1
    study = run(str(tmp_path), 3, parallel=1)
    assert [trial.state == FAIL for trial in study.trials()] == [True, False, False]
    assert search.finish(study).value == max(trial.value for trial in study.trials()[1:])
    ended = storage.join(study.uri, ENDED_FILE)
    run(str(tmp_path), 3)
    assert storage.exists(ended)
    run(str(tmp_path), 4)
    assert not storage.exists(ended)


def test_a_trial_without_a_score_has_failed(root, training, monkeypatch):
    monkeypatch.setattr(training, "score", lambda process: [0.5, math.nan][process.number])
    monkeypatch.setattr(training, "validations", 1)
    assert [trial.state for trial in run(root, 2).trials()] == [COMPLETE, FAIL]


def test_another_search_of_the_same_name_is_refused(tmp_path):
    run(str(tmp_path), 1)
    with pytest.raises(ConfigError, match="different overrides"):
        opened(str(tmp_path), 1, {"train.epochs": 5})
    with pytest.raises(ConfigError, match="'a/b' is not a valid name"):  # A pruning looks one level deep.
        Study(str(tmp_path), "a/b", "debug", {}, SPACE, "/data/shards/abc", 1)


def test_in_a_bucket_values_follow_from_seed_and_number(bucket):
    first, again = (opened("s3://bucket/root", 4).begin_trial(3).params for _ in range(2))
    assert first == again != opened("s3://bucket/root", 4).begin_trial(2).params
    run("s3://bucket/root", 4)
    trials = run("s3://bucket/root", 8).trials()
    assert {trial.state for trial in trials} == {COMPLETE}  # Nothing is pruned.
    assert trials[3].params == first and len(trials[3].intermediate_values) == 4
    assert len({trial.params["train.lr"] for trial in trials}) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"params": None}, {"params": {"train.lr": 0.01}}, {"params": {"train.lr": 7.0, "loader.mosaic": 0.0}},
        {"state": "good"}, {"value": "much"}, {"value": None}, {"validations": [None]}, {"number": "one"},
    ],
)  # fmt: skip
def test_a_record_of_a_bucket_with_other_content_is_refused_with_its_name(bucket, change):
    study, file = run("s3://bucket/root", 1), bucket / "root/tuning/first/trials/00000.json"
    record = json.loads(file.read_text())
    del record["file_sha256"]
    file.write_text(json.dumps(record))
    assert [trial.number for trial in study.trials()] == [0]
    for broken in (record | change, {key: record[key] for key in record.keys() - change.keys()}):
        file.write_text(json.dumps(broken))
        with pytest.raises(FormatError, match=r"trials/00000\.json") as caught:
            study.trials()
        assert "delete this file" in caught.value.fix


def search_in(root, begun, is_endless):
    """Train the trials of a search in another process, and print which ones it begins."""

    class Fake(ScriptedTraining):
        def __init__(self, command, **settings):
            super().__init__(command, **settings)
            begun.put((is_endless, self.number))

        def poll(self):
            return None if is_endless else super().poll()

    search.GuardedProcess = Fake
    run(root, 6)


def test_searches_share_a_study_and_take_up_what_a_killed_one_leaves(tmp_path):
    root, forked = str(tmp_path), multiprocessing.get_context("fork")
    begun = forked.Queue()
    killed = forked.Process(target=search_in, args=(root, begun, True))
    killed.start()
    first = [begun.get(timeout=60) for _ in range(2)]
    other = forked.Process(target=search_in, args=(root, begun, False))
    other.start()
    first.append(begun.get(timeout=60))  # It works while the one that is then killed does.
    os.kill(killed.pid, signal.SIGKILL)
    for one in (killed, other):
        one.join(60)
    assert other.exitcode == 0
    rest = [begun.get(timeout=60) for _ in range(5)]
    assert sorted(first + rest) == sorted([(True, 0), (True, 1), *((False, number) for number in range(6))])
    assert all(trial.state.is_finished() for trial in opened(root, 6).trials())


TWO_KEYS = "{train.lr: {low: 0.001, high: 0.1}, train.warmup_steps: {low: 1, high: 9}}"


@pytest.fixture
def asked(tmp_path):
    return (
        str(tmp_path),
        "",
        "debug",
        {"train.epochs": 4.0, "train.ema_decay": 0.5},
        TWO_KEYS,
        "/data/shards/abc",
        3,
    )


def trials(asked):
    return search.Study(*asked).trials()


def open_study(asked):
    root, name, recipe, overrides, space, uri, count = asked
    shards = Shards(
        data_root=root, uri=uri, fingerprint="abc", samples={}, boxes={}, recipe=recipe, overrides=overrides
    )
    return search.open_study(shards, name, space, count)


def test_each_pod_trains_its_trial_and_the_best_of_them_is_chosen(asked, tmp_path, training, monkeypatch):
    recorded = []
    monkeypatch.setattr(steps, "record_outcome", recorded.append)
    ended = [search.train_trial(open_study(asked), number, 2) for number in (2, 0, 1)]
    assert [line.split(":")[0] for line in ended] == ["trial 2", "trial 0", "trial 1"]
    study = tmp_path / "tuning" / "tune-debug"
    assert [one.output for one in training.begun] == [
        f"{study}/runs/{number:05d}/train" for number in (2, 0, 1)
    ]
    assert all(one.command[one.command.index("--nproc") + 1] == "2" for one in training.begun)
    written = trials(asked)
    assert len({json.dumps(trial.params) for trial in written}) == 3
    assert {type(trial.params["train.warmup_steps"]) for trial in written} == {int}
    table, configuration, metrics = (
        SimpleNamespace(path=str(tmp_path / name), metadata={})
        for name in ("table", "configuration", "metrics")
    )
    report_best_trial(search.choose_best(open_study(asked)), table, configuration, metrics)
    best = max(written, key=lambda trial: trial.value * (trial.state.name == "COMPLETE"))
    assert metrics.metadata == {"coco/AP": best.value, "trial": best.number}
    assert configuration.metadata == {"uri": str(study / "best.yaml")}
    assert recorded == [f"best: {search.describe_trial(best)}"]  # `kubedet tune --wait` shows it.
    assert Path(table.path).read_bytes() == (study / "trials.md").read_bytes()
    assert Path(configuration.path).read_bytes() == (study / "best.yaml").read_bytes()
    recipe, overrides = recipes.read_recipe(str(study / "best.yaml"))
    assert (recipe, overrides["train.lr"]) == ("debug", best.params["train.lr"])
    # Kubeflow makes 4.0 of 4.
    assert "train.epochs: 4," in str(yaml.safe_load(Path(configuration.path).read_text())).replace("'", "")


def test_a_pod_that_is_tried_again_goes_on_with_its_trial_which_counts_once(asked, training):
    training.codes[1] = EXIT_RETRY
    with pytest.raises(Interrupted, match="was stopped"):
        search.train_trial(open_study(asked), 1, 0)
    (before,) = trials(asked)
    assert before.state.name == "RUNNING"
    training.codes.clear()
    search.train_trial(open_study(asked), 1, 0)
    assert search.train_trial(open_study(asked), 1, 0).startswith(
        "trial 1: "
    )  # It has ended: nothing is trained.
    assert [one.number for one in training.begun] == [1, 1]
    (after,) = trials(asked)
    assert after.params == before.params
    assert after.state.is_finished()
