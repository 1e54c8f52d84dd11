"""The steps of a search in a cluster: a trial in each pod, and the best of all."""

import json

import pytest
import yaml

from operations.tuning import search
from trainer.base.errors import EXIT_RETRY, Interrupted
from trainer.model import recipes

SPACE = "{train.lr: {low: 0.001, high: 0.1}, train.warmup_steps: {low: 1, high: 9}}"


class Pod:
    """A training that ends as `ends` says of its trial; the larger the learning rate, the better."""

    def __init__(self, searched, trial, folder, stack, *, processes):
        Pod.begun.append((trial.number, processes, folder))
        self.code, self.value = Pod.ends.get(trial.number, 0), trial.params["train.lr"]

    def poll(self):
        return self.code

    def validations(self):
        return [self.value]

    def result(self):
        return self.value


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "LocalTraining", Pod)
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(Pod, "ends", {}, raising=False)
    monkeypatch.setattr(Pod, "begun", [], raising=False)
    data = {"uri": "/data/shards/abc"}
    return (data, "", "debug", {"train.epochs": 4.0, "train.ema_decay": 0.5}, SPACE, str(tmp_path), 3)


def trials(asked):
    return search.open_study(asked).trials()


def test_each_pod_trains_its_trial_and_the_best_of_them_is_chosen(asked, tmp_path):
    ended = [search.train_trial(asked, number, 2) for number in ("2", "0", "1")]
    assert [line.split(":")[0] for line in ended] == ["trial 2", "trial 0", "trial 1"]
    study = tmp_path / "tuning" / "tune-debug"
    assert Pod.begun == [(number, 2, str(study / "runs" / f"{number:05d}")) for number in (2, 0, 1)]
    written = trials(asked)
    assert len({json.dumps(trial.params) for trial in written}) == 3
    assert {type(trial.params["train.warmup_steps"]) for trial in written} == {int}
    paths = tmp_path / "page", tmp_path / "configuration"
    found = search.choose(asked, ended, tuple(map(str, paths)))
    best = max(written, key=lambda trial: trial.params["train.lr"] * (trial.state == "complete"))
    assert found["metrics"] == {"coco/AP": best.value, "trial": best.number}
    assert found["shown"] == {"uri": str(study / "best.yaml")}
    assert paths[0].read_bytes() == (study / "tuning.html").read_bytes()
    assert paths[1].read_bytes() == (study / "best.yaml").read_bytes()
    recipe, overrides = recipes.named(str(study / "best.yaml"))
    assert (recipe, overrides["train.lr"]) == ("debug", best.params["train.lr"])
    # Kubeflow makes 4.0 of 4.
    assert "train.epochs: 4," in str(yaml.safe_load(paths[1].read_text())).replace("'", "")


def test_a_pod_that_is_tried_again_goes_on_with_its_trial_which_counts_once(asked):
    Pod.ends[1] = EXIT_RETRY
    with pytest.raises(Interrupted, match="was stopped"):
        search.train_trial(asked, "1", 0)
    (before,) = trials(asked)
    assert before.state == "running"
    Pod.ends.clear()
    search.train_trial(asked, "1", 0)
    assert search.train_trial(asked, "1", 0).startswith("trial 1: ")  # It has ended: nothing is trained.
    assert [number for number, _, _ in Pod.begun] == [1, 1]
    (after,) = trials(asked)
    assert after.params == before.params
    assert after.state != "running"
