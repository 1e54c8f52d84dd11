"""`kubedet run`: the whole pipeline under kfp.local, and its errors."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from webhook import Webhook

from operations import costs
from pipelines import cli
from pipelines.commands.run import Options, _check_same
from trainer import storage
from trainer.base.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("forked_processes")

KUBEDET = [sys.executable, "-m", "pipelines.cli"]


def settings(tmp_path, tiny_overrides):
    places = ["--data-root", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    return [*places, *(part for key, value in tiny_overrides.items() for part in ("--set", f"{key}={value}"))]


TINY = {
    "loader.image_size": 96, "model.backbone_width": 8, "model.fpn_channels": 16, "model.head_depth": 1,
    "train.epochs": 1, "train.batch_size": 4, "export.check_images": 1,
    "evaluation.gate": '["coco/AP >= 0"]', "data.processes": 1,
}  # fmt: skip
SOURCE = ["--source", "sample:images=12,seed=5,size=96"]


@pytest.mark.parametrize(
    "words", [("--set", "train.epochs=1.5"), ("--source", "coco:/nonexistent"), ("--prices", "/nonexistent")]
)
def test_mistakes_are_refused_before_anything_starts(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *words, "--output", str(tmp_path / "runs")]) == 2
    assert words[1].removeprefix("coco:").partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_other_settings_are_refused_once_it_has_trained(tmp_path):
    before = Options("a", {"output": str(tmp_path), "overrides": {"train.epochs": 1}})
    after = replace(before, given={**before.given, "overrides": {"train.epochs": 2}})
    record = {"kind": "run", "version": 1, "arguments": before.arguments()}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps(record))
    _check_same(before.folder, after)
    (tmp_path / "a" / "train").mkdir()
    _check_same(before.folder, before)
    with pytest.raises(ConfigError, match=r'overrides: was {"train\.epochs": 1}, now {"train\.epochs": 2}'):
        _check_same(before.folder, after)


def test_a_damaged_summary_is_only_a_warning(tmp_path, capsys):
    options = Options("a", {"output": str(tmp_path)})
    (tmp_path / "a" / "train").mkdir(parents=True)
    path = tmp_path / "a" / "summary.json"
    storage.write_json(str(path), {"kind": "run", "version": 1, "arguments": {"source": "another"}}, indent=2)
    for damaged in (path.read_text().replace("another", "anothes"), "[]", "{"):
        path.write_text(damaged)
        _check_same(options.folder, options)
        assert f"warning: {path}" in capsys.readouterr().err
    path.write_text('{"kind": "run", "version": 9}')
    with pytest.raises(DataError, match="was written by a newer kubedet"):
        _check_same(options.folder, options)


def test_a_quick_run_is_one_of_few_minutes(monkeypatch):
    asked = []
    monkeypatch.setattr("pipelines.commands.run.run", lambda request: asked.append(request) or 0)
    assert cli.main(["run", "--quick", "--recipe", "small", "--set", "train.lr=0.1"]) == 0
    assert asked[0]["overrides"] == {"train.minutes": 4, "train.lr": 0.1}
    # The command that goes on with it has the value itself.
    assert "--set train.minutes=4" in asked[0].command() and "--quick" not in asked[0].command()
    assert cli.main(["run", "--quick", "--set", "train.minutes=7"]) == 0
    assert asked[1]["overrides"] == {"train.minutes": 7}  # What is set wins.


@pytest.mark.slow
def test_the_whole_pipeline(tmp_path, kubedet, monkeypatch):
    monkeypatch.setenv(costs.VARIABLE, "")  # It is set, and must not stay.
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "private.pem").write_bytes(key)
    monkeypatch.setenv("KUBEDET_SIGNING_KEY", str(tmp_path / "private.pem"))
    options = [*SOURCE, *settings(tmp_path, TINY)]
    (tmp_path / "prices.yaml").write_text("currency: EUR\nnode_hour: 1000\n")
    code, out, err = kubedet("run", "--name", "first", *options, "--prices", tmp_path / "prices.yaml")
    assert code == 0, out + err
    folder = tmp_path / "runs" / "first"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "succeeded" and summary["gate"]["passed"]
    assert [step["status"] for step in summary["steps"]] == ["done"] * 4
    assert all(step["seconds"] > 0 for step in summary["steps"])
    assert summary["training"]["images_per_second"] > 0 and summary["training"]["processes"] == 2
    assert len(summary["metrics"]) == 13 and {"torch", "kfp", "python"} <= summary["versions"].keys()
    for path in summary["paths"].values():
        assert os.path.exists(path), path
        assert os.path.relpath(path) in out or path in out
    assert "AP50" in out and "gate: passed" in out
    # The use of each step is in the summary, on the page and in the report.
    used = {step["step"]: step for step in summary["used"]["steps"]}
    assert list(used) == ["prepare", "train", "evaluate", "export"]
    assert all(step["tries"] == 1 and step["node_hours"] > 0 for step in used.values())
    assert summary["used"]["total"]["money"]["value"] > 0 and summary["used"]["currency"] == "EUR"
    assert "what it used\nstep " in out
    page = Path(summary["paths"]["report"]).read_text()
    assert "What it used" in page and "<td>train</td>" in page and "<td>export</td>" not in page
    inputs = onnxruntime.InferenceSession(f"{summary['paths']['model']}/model.onnx").get_inputs()
    assert inputs[0].shape[1:] == [3, 96, 96]
    # The model is signed, and nothing that the run wrote or printed contains the key.
    assert (Path(summary["paths"]["model"]) / "model.sig").exists()
    body, written = key.splitlines()[1], [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written if body in path.read_bytes()] == ["private.pem"]
    assert body.decode() not in out + err
    # The same file runs on a cluster. A second run finds its data, and nothing to learn from it.
    assert (folder / "pipeline.yaml").exists()
    server = Webhook()
    monkeypatch.setenv("OPENLINEAGE_URL", server.url)
    code, out, err = kubedet("run", "--name", "second", *options, "--min-new-images", "1")
    server.close()
    assert code == 0, out + err
    summary = json.loads((tmp_path / "runs" / "second" / "summary.json").read_text())
    assert summary["status"] == "succeeded" and summary["nothing_new_since"].startswith("sample ")
    assert [step["status"] for step in summary["steps"]] == ["done", "skipped", "skipped", "skipped"]
    assert f"nothing new since {summary['nothing_new_since']}: nothing was trained" in out
    # In any order: the run does not wait for the first.
    posted = sorted((event["eventTime"], event["eventType"], event["outputs"]) for event in server.posted)
    assert [words[1:] for words in posted] == [("START", []), ("COMPLETE", [])]
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in server.posted}
    assert len(parents) == 1


@pytest.mark.slow
def test_a_failing_step_fails_the_run_and_says_why(tmp_path, kubedet):
    annotations = tmp_path / "set" / "annotations" / "instances_train.json"
    annotations.parent.mkdir(parents=True)
    annotations.write_text('{"images": [')
    words = ("run", "--name", "bad", "--source", f"coco:{tmp_path}/set", *settings(tmp_path, TINY))
    code, out, err = kubedet(*words)
    assert code == 2
    assert "error in step prepare" in err and str(annotations) in err and "Traceback" not in out + err
    assert "Prepare the data: failed" in out and "Train" not in out
    summary = json.loads((tmp_path / "runs" / "bad" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"]["step"] == "prepare"


def processes_of(tmp_path):
    process_ids = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and str(tmp_path).encode() in (process / "cmdline").read_bytes():
                process_ids.append(int(process.name))
    return process_ids


def wait_until(condition, seconds=240):
    for _ in range(seconds * 20):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited in vain")


@pytest.mark.slow
def test_killed_and_stopped_it_leaves_nothing_behind_and_goes_on(tmp_path, kubedet):
    options = ["--name", "killed", *SOURCE, *settings(tmp_path, TINY | {"train.epochs": 40}), "--nproc", "1"]
    folder = tmp_path / "runs" / "killed"
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen([*KUBEDET, "run", *options], stdout=output, stderr=output)
    wait_until(lambda: list((folder / "train" / "checkpoints").glob("*.pt")) or process.poll() is not None)
    code, _, err = kubedet("run", *options)
    assert code == 2 and "'killed' is in progress" in err
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(tmp_path))
    code, _, err = kubedet("run", *options, "--set", "train.seed=5")
    assert code == 2 and "started with other settings" in err
    process = subprocess.Popen(
        [*KUBEDET, "run", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert any("resumed at step" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 143 and not processes_of(tmp_path), output
    assert "Train: stopped" in output and "failed" not in output and "Traceback" not in output
    assert output.splitlines()[-2] == "interrupted in step train; to continue:"
    assert output.splitlines()[-1].startswith("  kubedet run --name killed ")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["error"]["step"] == "train"
    used = {step["step"]: step["tries"] for step in summary["used"]["steps"]}
    assert used["prepare"] == 2
