"""`kubedet tune`, and `--recipe FILE`."""

import shutil

import pytest
import yaml

from pipelines.tuning import search
from trainer import recipes

SOURCE = "sample:images=24,seed=3,size=96"


class Ended:
    """A training that has ended; the larger the learning rate, the better."""

    begun = 0

    def __init__(self, searched, record, folder, parallel, stack):
        Ended.begun += 1
        self.value = record.params["train.lr"]

    def poll(self):
        return 0

    def validations(self):
        return [self.value]

    def result(self):
        return self.value

    def stop(self):
        raise AssertionError

    def wait(self):
        return 0


@pytest.fixture
def tune(kubedet, data_root, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "LocalTraining", Ended)
    monkeypatch.setattr(search, "_POLL", 0)
    monkeypatch.setattr(Ended, "begun", 0)
    place = ["--source", SOURCE, "--data-root", data_root, "--output", str(tmp_path / "runs")]
    yield lambda *words: kubedet("tune", "--name", "search", "--set", "data.processes=1", *place, *words)
    shutil.rmtree(f"{data_root}/tuning", ignore_errors=True)


def test_a_search_writes_the_page_and_a_recipe_that_a_search_takes(tune, data_root, tmp_path):
    code, out, err = tune("--trials", "5", "--parallel", "2")
    assert (code, err) == (0, "")
    assert out.count("\ntrial ") + out.startswith("trial ") == 5
    folder = tmp_path / "runs" / "search"
    html = (folder / "tuning.html").read_text()
    for word in ("History", "Validations of each trial", "Importance of each key", "recipe: debug"):
        assert word in html
    recipe, overrides = recipes.named(str(folder / "best.yaml"))
    assert (recipe, overrides["data.processes"]) == ("debug", 1)
    assert f"train.lr={overrides['train.lr']:.3g}" in out.split("best: ")[1]
    with open(f"{data_root}/tuning/search/best.yaml") as file:
        assert yaml.safe_load(file)["set"] == overrides
    assert tune("--trials", "6")[0] == 0
    assert Ended.begun == 6
    code, _, err = tune("--recipe", folder / "best.yaml")
    assert code == 2
    assert "nothing is left to search" in err  # The file sets it all.


def test_a_space_is_printed_as_a_file_that_is_read(tune, tmp_path):
    code, out, _ = tune("--show-space", "--set", "train.lr=0.01")
    assert code == 0
    assert "loader.mosaic" in out and "train.lr" not in out
    (tmp_path / "space.yaml").write_text(out)
    assert tune("--show-space", "--space", tmp_path / "space.yaml")[:2] == (0, out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "0"], "--trials must be 1 or more"),
        (["--parallel", "0"], "--parallel must be 1 or more"),
        (["--recipe", "nosuch"], "no recipe 'nosuch'"),
        (["--space", "nosuch.yaml"], "nosuch.yaml"),
        (["--name", "../a"], "cannot be a folder's"),
    ],
)
def test_mistakes_are_refused_before_any_trial(tune, words, said):
    code, _, err = tune(*words)
    assert code == 2
    assert said in err
    assert Ended.begun == 0


def test_without_optuna_it_says_what_to_install(tune, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    code, _, err = tune()
    assert code == 2
    assert "pip install 'kubedet[tune]'" in err
