"""`kubedet tune`, and `--recipe FILE`."""

import shutil

import pytest
import yaml
from scripted_training import ScriptedTraining

from kubedet import cli
from operations.tuning import search
from trainer.model import recipes

SOURCE = "sample:images=24,seed=3,size=96"


@pytest.fixture
def tune(kubedet, data_root, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "GuardedProcess", ScriptedTraining)
    monkeypatch.setattr(search, "_POLL_SECONDS", 0)
    monkeypatch.setattr(ScriptedTraining, "begun", [])
    monkeypatch.setattr(ScriptedTraining, "validations", 1)
    place = ["--source", SOURCE, "--data-root", data_root, "--output", str(tmp_path / "runs")]
    yield lambda *words: kubedet("tune", "--name", "search", "--set", "data.processes=1", *place, *words)
    shutil.rmtree(f"{data_root}/tuning", ignore_errors=True)


@pytest.mark.slow
def test_a_search_writes_a_table_and_a_recipe_that_a_search_takes(tune, data_root, tmp_path):
    code, out, err = tune("--trials", "5", "--parallel", "2")
    assert (code, err) == (0, "")
    assert out.count("\ntrial ") + out.startswith("trial ") == 5
    folder = tmp_path / "runs" / "search"
    header, _, *rows = (folder / "trials.md").read_text().splitlines()[2:]
    assert header.startswith("| trial | state | coco/AP | train.lr |") and len(rows) == 5
    recipe, overrides = recipes.read_recipe(str(folder / "best.yaml"))
    assert (recipe, overrides["data.processes"]) == ("debug", 1)
    assert f"train.lr={overrides['train.lr']:.4g}" in out.split("best: ")[1]
    with open(f"{data_root}/tuning/search/best.yaml") as file:
        assert yaml.safe_load(file)["set"] == overrides
    assert tune("--trials", "6")[0] == 0
    assert len(ScriptedTraining.begun) == 6
    code, _, err = tune("--recipe", folder / "best.yaml")
    assert code == 2
    assert "there is nothing to search" in err  # The file sets it all.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "0"], "trials: "),
        (["--parallel", "0"], "parallel: "),
        (["--recipe", "nosuch"], "unknown recipe 'nosuch'"),
        (["--space", "nosuch.yaml"], "nosuch.yaml"),
        (["--name", "../a"], "not a valid name"),
    ],
)
def test_mistakes_are_refused_before_any_trial(tune, words, said):
    code, _, err = tune(*words)
    assert code == 2
    assert said in err
    assert len(ScriptedTraining.begun) == 0


SUBMIT = [
    "submit", "--data-root", "s3://bucket/root", "--source", SOURCE, "--trials", "3",
    "--parallelism", "2", "--set", "train.epochs=2", "--study", "first",
]  # fmt: skip


def test_a_search_in_kubeflow_is_one_run(kfp_server, capsys):
    assert cli.main(SUBMIT) == 0
    (run,) = kfp_server.runs
    shown = capsys.readouterr().out
    assert "s3://bucket/root/tuning/first" in shown and "kubedet job status" not in shown
    given = run["runtime_config"]["parameters"]
    space = yaml.safe_load(given.pop("space"))
    assert set(space) >= {"train.lr", "loader.mosaic"}
    assert given == {
        "data_root": "s3://bucket/root",
        "source": SOURCE,
        "overrides": {"train.epochs": 2},
        "study": "first",
        "step_cpu": "500m",
        "step_memory": "2Gi",
    }
    assert run["display_name"].startswith("first-")
    spec = run["pipeline_spec"]["pipeline_spec"]
    (loop,) = [item for name, item in spec["components"].items() if name.startswith("comp-for-loop")]
    assert set(loop["dag"]["tasks"]) == {"trial"}
