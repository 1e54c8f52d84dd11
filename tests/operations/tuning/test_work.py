"""The steps of a search in a cluster: a trial in each pod, and the best of all."""

import json

import pytest
import yaml
from fake_training import FakeTraining

from operations.tuning import search
from trainer.base.errors import EXIT_RETRY, Interrupted
from trainer.model import recipes

SPACE = "{train.lr: {low: 0.001, high: 0.1}, train.warmup_steps: {low: 1, high: 9}}"


@pytest.fixture
def training(monkeypatch):
    class Fake(FakeTraining):
        codes, begun = {}, []

    monkeypatch.setattr(search, "GuardedProcess", Fake)
    monkeypatch.setattr(search, "_POLL_SECONDS", 0.001)
    return Fake


@pytest.fixture
def asked(tmp_path):
    return (
        str(tmp_path),
        "",
        "debug",
        {"train.epochs": 4.0, "train.ema_decay": 0.5},
        SPACE,
        "/data/shards/abc",
        3,
    )


def trials(asked):
    return search.Study(*asked).trials()


def test_each_pod_trains_its_trial_and_the_best_of_them_is_chosen(asked, tmp_path, training):
    ended = [search.train_trial(number, 2, *asked) for number in ("2", "0", "1")]
    assert [line.split(":")[0] for line in ended] == ["trial 2", "trial 0", "trial 1"]
    study = tmp_path / "tuning" / "tune-debug"
    assert [one.output for one in training.begun] == [
        f"{study}/runs/{number:05d}/train" for number in (2, 0, 1)
    ]
    assert all(one.command[one.command.index("--nproc") + 1] == "2" for one in training.begun)
    written = trials(asked)
    assert len({json.dumps(trial.params) for trial in written}) == 3
    assert {type(trial.params["train.warmup_steps"]) for trial in written} == {int}
    paths = tmp_path / "page", tmp_path / "configuration"
    found = search.choose(tuple(map(str, paths)), *asked)
    best = max(written, key=lambda trial: trial.value * (trial.state.name == "COMPLETE"))
    assert found["metrics"] == {"coco/AP": best.value, "trial": best.number}
    assert found["shown"] == {"uri": str(study / "best.yaml")}
    assert paths[0].read_bytes() == (study / "tuning.html").read_bytes()
    assert paths[1].read_bytes() == (study / "best.yaml").read_bytes()
    recipe, overrides = recipes.named(str(study / "best.yaml"))
    assert (recipe, overrides["train.lr"]) == ("debug", best.params["train.lr"])
    # Kubeflow makes 4.0 of 4.
    assert "train.epochs: 4," in str(yaml.safe_load(paths[1].read_text())).replace("'", "")


def test_a_pod_that_is_tried_again_goes_on_with_its_trial_which_counts_once(asked, training):
    training.codes[1] = EXIT_RETRY
    with pytest.raises(Interrupted, match="was stopped"):
        search.train_trial("1", 0, *asked)
    (before,) = trials(asked)
    assert before.state.name == "RUNNING"
    training.codes.clear()
    search.train_trial("1", 0, *asked)
    assert search.train_trial("1", 0, *asked).startswith("trial 1: ")  # It has ended: nothing is trained.
    assert [one.number for one in training.begun] == [1, 1]
    (after,) = trials(asked)
    assert after.params == before.params
    assert after.state.is_finished()
