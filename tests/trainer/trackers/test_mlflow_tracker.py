"""A training's metrics at MLflow, in its own store, through its own client."""

import pytest
from finished_runs import stopped_after

from trainer.trackers.training_log import read_rows
from trainer.training.loop import train

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def client(tmp_path, monkeypatch):
    """MLflow's store of files, and the variables that lead a training to it."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    uri = f"file://{tmp_path}/store"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return mlflow.MlflowClient(tracking_uri=uri)


def runs_of(client):
    experiments = [one.experiment_id for one in client.search_experiments() if one.name == "kubedet"]
    return list(client.search_runs(experiments)) if experiments else []


@pytest.mark.slow
def test_a_training_that_goes_on_is_one_run_with_parameters_metrics_by_step_and_its_best(
    client, tiny, shards, tmp_path
):
    config, output = tiny(train__epochs=1), str(tmp_path / "first/train")
    with stopped_after(3):
        train(config, shards, output)
    assert [run.info.status for run in runs_of(client)] == ["KILLED"]
    result = train(config, shards, output)
    (run,) = runs_of(client)
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "1" and run.data.params["model.backbone"] == "resnet18"
    assert run.data.tags["kubedet.recipe"] == "debug"
    assert run.data.tags["kubedet.checkpoint"] == result["checkpoint"]
    assert run.data.metrics["best/AP"] == result["metrics"]["coco/AP"]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    rows = [row for row in read_rows(output) if row["kind"] == "train"]
    assert {one.step: one.value for one in history} == {row["step"]: row["loss"] for row in rows}
    assert len(rows) == 6 and client.get_metric_history(run.info.run_id, "val/AP")


def test_a_run_that_kubeflow_began_gets_the_metrics_and_is_left_open(
    client, tiny, shards, tmp_path, monkeypatch
):
    theirs = client.create_run(client.create_experiment("pipelines"), run_name="step")
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs.info.run_id)
    train(tiny(train__epochs=1), shards, str(tmp_path))
    run = client.get_run(theirs.info.run_id)
    assert "best/AP" in run.data.metrics and run.info.status == "RUNNING" and not runs_of(client)
