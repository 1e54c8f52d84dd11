"""The compiled pipeline really runs: under Kubeflow's own local runner, the clean-up included."""

import hashlib
import json
import os
import re
import subprocess
import sys

import onnxruntime
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from components import environment
from components.jobs import job_name
from trainer.model import recipes

RUN = """
import json, sys, yaml
from pathlib import Path
from kfp import components, local
from pipelines.compiler import compile_pipeline
from pipelines.pipeline_run import CompileOptions

file, root, arguments = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
form = {"trials": arguments.pop("trials", 0), "parallelism": arguments.pop("parallelism", 16)}
form |= {"conditional": "min_new_images" in arguments}
compile_pipeline(file, CompileOptions(**form))
spec = next(yaml.safe_load_all(file.read_text()))
for graph in [spec["root"], *spec["components"].values()]:
    for name, task in graph.get("dag", {}).get("tasks", {}).items():
        task.pop("retryPolicy", None)  # The runner would wait half a minute.
        # The local runner's id of a run is a number that only the runner knows.
        given = task.get("inputs", {}).get("parameters", {}).get("run_id", {}).get("runtimeValue")
        if given:
            given["constant"] = "the-run"
local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=root)
components.load_component_from_text(yaml.safe_dump(spec))(**arguments)
"""
TINY = {
    "loader.image_size": 96, "model.backbone_width": 8, "model.fpn_channels": 16, "model.head_depth": 1,
    "train.epochs": 1, "train.batch_size": 4, "data.processes": 1,
}  # fmt: skip


def run(tmp_path, env=None, **arguments):
    given = {"data_root": str(tmp_path / "data"), **arguments}
    return subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "pipeline.yaml", tmp_path / "artifacts", json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


def words(done):
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def trains(pod):
    """The life of a pod that does what its container is told."""
    pod.run()
    (container,) = pod.body["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    command = [sys.executable, *container["command"][1:], *container.get("args", [])]
    done = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    pod.say(*done.stdout.splitlines())
    pod.exit(done.returncode)


def files_of(folder):
    """Digests of the files below a folder that do not depend on when and where they were written."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.suffix in (".jpg", ".png", ".tar", ".npy", ".parquet", ".csv", ".txt"):
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_file() and "tensorboard" not in name:
            digests[name] = ""
    return digests


@pytest.fixture
def signing_key(tmp_path, monkeypatch):
    """A line of a key, with which the runs sign their models."""
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "private.pem").write_bytes(key)
    monkeypatch.setenv("KUBEDET_SIGNING_KEY", str(tmp_path / "private.pem"))
    return key.splitlines()[1]


@pytest.mark.slow
def test_a_local_run_writes_the_same_files_as_the_compiled_pipeline(tmp_path, signing_key, kubedet):
    common = {"source": "sample:images=12,seed=5,size=96", "overrides": TINY, "gate": "coco/AP50 >= 0.0"}
    pipeline, local = tmp_path / "pipeline", tmp_path / "local"
    for folder in (pipeline, local):
        folder.mkdir()
    options = ["--nproc", "1", *(f"--set={key}={json.dumps(value)}" for key, value in TINY.items())]
    options += ["--source", common["source"], "--gate", common["gate"], "--output", local / "runs"]
    options += ["--data-root", local / "data"]
    code, out, err = kubedet("run", "--name", "one", *options)
    assert code == 0, out + err
    check_results(local / "runs" / "one", out)
    # The model is signed, and nothing that the run wrote or printed contains the key.
    assert (local / "runs" / "one" / "model" / "model.sig").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written if signing_key in path.read_bytes()] == ["private.pem"]
    assert signing_key.decode() not in out + err
    done = run(pipeline, launcher="local", nproc=1, output=str(pipeline / "runs" / "one"), **common)
    assert done.returncode == 0, words(done)
    theirs, ours = files_of(pipeline), files_of(local)
    only_theirs = {name for name in theirs.keys() - ours.keys() if not name.startswith("artifacts/")}
    assert only_theirs == {"pipeline.yaml"}
    own = ("summary.json", "log.txt", ".lock", ".kubedet-files", "manifests/")
    only_ours = {
        name for name in ours.keys() - theirs.keys() if not name.removeprefix("runs/one/").startswith(own)
    }
    assert not only_ours
    same = {name for name in theirs.keys() & ours.keys() if not name.endswith("predictions.parquet")}
    assert {name for name in same if theirs[name] != ours[name]} == set()
    best = [
        torch.load(folder / "runs/one/train/best.pt", weights_only=True)["model"]
        for folder in (pipeline, local)
    ]
    assert best[0].keys() == best[1].keys()
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[0])
    # A second run finds its data, and nothing to learn from it.
    code, out, err = kubedet("run", "--name", "second", *options, "--min-new-images", "1")
    assert code == 0, out + err
    summary = json.loads((local / "runs" / "second" / "summary.json").read_text())
    assert summary["status"] == "succeeded" and summary["nothing_new_since"].startswith("sample ")
    assert [step["status"] for step in summary["steps"]] == ["done"] + ["skipped"] * 4
    assert f"nothing new since {summary['nothing_new_since']}: nothing was trained" in out


def check_results(folder, out):
    """Check what a run left in its folder and printed."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "succeeded" and summary["gate"]["passed"]
    assert [step["status"] for step in summary["steps"]] == ["done"] * 5
    assert all(step["seconds"] > 0 for step in summary["steps"])
    assert summary["training"]["images_per_second"] > 0
    assert len(summary["metrics"]) == 13 and {"torch", "python"} <= summary["versions"].keys()
    for path in summary["paths"].values():
        assert os.path.exists(path), path
        assert os.path.relpath(path) in out or path in out
    assert "AP50" in out and "gate: passed" in out
    inputs = onnxruntime.InferenceSession(f"{summary['paths']['model']}/model.onnx").get_inputs()
    assert inputs[0].shape[1:] == [3, 96, 96]


@pytest.mark.slow
def test_a_training_in_a_cluster(served_cluster, tmp_path):
    name = job_name("the-run")
    served_cluster.lives[f"{name}-worker-0"] = trains
    job = {"mounts": [{"claim": "scratch", "path": str(tmp_path)}], "memory_limit": "4Gi"}
    done = run(
        tmp_path,
        served_cluster.environment,
        launcher="kubernetes",
        source="sample:images=12,seed=5,size=96",
        overrides=TINY,
        gate="coco/AP50 >= 1.0",
        image="registry.example/kubedet:1",
        job=job,
        min_new_images=1,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cluster_job = served_cluster.job(name)
    (container,) = cluster_job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/kubedet:1"
    assert container["resources"]["limits"]["memory"] == "4Gi"
    output = words(done)
    # Its log came through the step's, its results are in the run's folder, and it is left to its readers.
    assert "train: epoch 1: coco/AP" in output
    assert (tmp_path / "data" / "runs" / "the-run" / "train" / "best.pt").exists()
    assert f"the job {name} is succeeded" in output


@pytest.mark.slow
@pytest.mark.extra
def test_a_search_whose_trials_have_a_pod_each(served_cluster, tmp_path):
    lines = {
        "space": "{train.lr: {low: 0.001, high: 0.01}}", "study": "first", "trials": 2, "parallelism": 2,
        "source": "sample:images=12,seed=5,size=96", "overrides": TINY | {"loader.workers": 1},
    }  # fmt: skip
    done = run(tmp_path, served_cluster.environment | {environment.RUN_ID: "the-run"}, **lines)
    output = words(done)
    assert done.returncode == 0, output
    study = tmp_path / "data" / "tuning" / "first"
    states = re.findall(r"trial (\d): (\w+) ", output)
    assert {number for number, _ in states} == {"0", "1"}
    assert {state for _, state in states} <= {"complete", "pruned"}
    recipe, overrides = recipes.read_recipe(str(study / "best.yaml"))
    assert recipe == "debug" and 0.001 <= overrides["train.lr"] <= 0.01
    (table,) = (tmp_path / "artifacts").rglob("table")
    assert table.read_text() == (study / "trials.md").read_text()
    assert "nothing to clean up" not in output and "Executing task 'cleanup'" in output
