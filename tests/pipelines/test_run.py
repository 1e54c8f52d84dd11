"""`kubedet run`: the whole pipeline under kfp.local, and its errors."""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import run_pods
from patience import until

from kubedet import cli
from pipelines import Access, run
from pipelines.display import RunProgress, describe_step
from pipelines.kubeflow import Server
from pipelines.run import Options, RunRecord, _check_unchanged, check_options, failure_error
from pipelines.wait import Pods, raise_if_failed
from trainer import storage
from trainer.base.errors import ConfigError, DataError, KubedetError, LaunchError
from trainer.storage import outputs

KUBEDET = [sys.executable, "-m", "kubedet.cli"]


def settings(tmp_path, tiny_overrides):
    places = ["--data-root", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    return [*places, *(part for key, value in tiny_overrides.items() for part in ("--set", f"{key}={value}"))]


TINY = {
    "loader.image_size": 96, "model.backbone_width": 8, "model.fpn_channels": 16, "model.head_depth": 1,
    "train.epochs": 1, "train.batch_size": 4, "export.check_images": 1,
    "evaluation.gate": '["coco/AP >= 0"]', "data.processes": 1,
}  # fmt: skip
SOURCE = ["--source", "sample:images=12,seed=5,size=96"]


@pytest.mark.parametrize("words", [("--set", "train.epochs=1.5"), ("--source", "coco:missing")])
def test_mistakes_are_refused_before_anything_starts(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *words, "--output", str(tmp_path / "runs")]) == 2
    assert words[1].removeprefix("coco:").partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_other_settings_are_refused_once_it_has_trained(tmp_path):
    before = Options("a", output=str(tmp_path), overrides={"train.epochs": 1})
    after = replace(before, overrides={"train.epochs": 2})
    (tmp_path / "a").mkdir()
    RunRecord("a", before.arguments()).write(tmp_path / "a")
    _check_unchanged(before.folder, after)
    (tmp_path / "a" / "train").mkdir()
    _check_unchanged(before.folder, before)
    with pytest.raises(ConfigError, match=r'overrides: was {"train\.epochs": 1}, now {"train\.epochs": 2}'):
        _check_unchanged(before.folder, after)


def test_a_damaged_summary_is_only_a_warning(tmp_path, capsys):
    options = Options("a", output=str(tmp_path))
    (tmp_path / "a" / "train").mkdir(parents=True)
    path = tmp_path / "a" / "summary.json"
    storage.write_json(str(path), {"kind": "run", "version": 1, "arguments": {"source": "another"}}, indent=2)
    for damaged in (path.read_text().replace("another", "anothes"), "[]", "{"):
        path.write_text(damaged)
        _check_unchanged(options.folder, options)
        assert f"warning: {path}" in capsys.readouterr().err
    RunRecord("a", {}).write(path.parent)
    path.write_text(json.dumps(storage.read_json(str(path)) | {"version": 9}))
    with pytest.raises(DataError, match="was written by another version of kubedet"):
        _check_unchanged(options.folder, options)


def test_minutes_are_an_override(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "run", lambda options: asked.append(options) or RunRecord("a", {}))
    assert cli.main(["run", "--minutes", "4", "--recipe", "small", "--set", "train.lr=0.1"]) == 0
    assert asked[0].overrides == {"train.minutes": 4, "train.lr": 0.1}
    assert "--set train.minutes=4" in asked[0].command()


@pytest.mark.slow
def test_a_failing_step_fails_the_run_and_says_why(tmp_path, kubedet):
    annotations = tmp_path / "set" / "annotations" / "instances_train.json"
    annotations.parent.mkdir(parents=True)
    annotations.write_text('{"images": [')
    words = ("run", "--name", "bad", "--source", f"coco:{tmp_path}/set", *settings(tmp_path, TINY))
    code, out, err = kubedet(*words)
    assert code == 2
    assert "error: step download: " in err and str(annotations) in err and "Traceback" not in out + err
    assert "Download: failed" in out and "Train" not in out
    summary = json.loads((tmp_path / "runs" / "bad" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"]["step"] == "download"


def processes_of(tmp_path):
    process_ids = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and str(tmp_path).encode() in (process / "cmdline").read_bytes():
                process_ids.append(int(process.name))
    return process_ids


@pytest.mark.slow
def test_killed_and_stopped_it_leaves_nothing_behind_and_goes_on(tmp_path, kubedet):
    options = ["--name", "killed", *SOURCE, *settings(tmp_path, TINY | {"train.epochs": 40}), "--nproc", "1"]
    folder = tmp_path / "runs" / "killed"
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen([*KUBEDET, "run", *options], stdout=output, stderr=output)
    until(lambda: list((folder / "train" / "checkpoints").glob("*.pt")) or process.poll() is not None, 240)
    code, _, err = kubedet("run", *options)
    assert code == 2 and "'killed' is in progress" in err
    process.kill()
    process.wait()
    until(lambda: not processes_of(tmp_path), 240)
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
    assert output.splitlines()[-2] == "error: the run was stopped in step train"
    assert output.splitlines()[-1].startswith("  fix: to continue: kubedet run --name killed ")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["error"]["step"] == "train"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps({"images": 80, "split": "test"}))
    (tmp_path / "evaluation" / "table.txt").write_text("precision AP\n          0.5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def record(folder):
    return RunRecord(
        "first",
        {},
        "succeeded",
        "2026-01-01T10:00:00+00:00",
        "2026-01-01T11:00:05+00:00",
        training={"steps": 10, "seconds": 62.0, "images_per_second": 12.34, "processes": 2},
        metrics={"coco/AP": 0.5},
        gate={"passed": True, "reason": "coco/AP 0.5 >= 0: passed"},
        paths={"report": str(folder / "evaluation" / "report.html"), "model": str(folder / "a model")},
    )


def test_the_error_of_a_run_names_the_step_and_how_to_continue(record, folder):
    record.status, record.error = "interrupted", {"step": "train", "message": "stopped", "exit_code": 143}
    progress = RunProgress(folder / "events")
    error = failure_error(record, progress, Options("first"))
    assert error.exit_code == 143 and "kubedet run --name first" in error.fix
    record.status, record.error = "failed", {"step": "", "message": "bad\n  fix: mend it", "exit_code": 2}
    error = failure_error(record, progress, Options("first"))
    assert (error.message, error.fix, error.exit_code) == ("bad", "mend it", 2)


def test_a_finished_run_that_is_repeated_prints_its_results(record, folder, capsys, monkeypatch):
    (folder / outputs.RECORD).write_text(json.dumps(run._OUTPUT_FILES))
    for name in ("train", "a model"):
        (folder / name).mkdir()
    (folder / "evaluation" / "report.html").touch()
    options = Options(folder.name, output=str(folder.parent), nproc=1)
    replace(record, arguments=options.arguments()).write(folder)
    started: list[object] = []
    monkeypatch.setattr(run, "_run_steps", lambda *given: bool(started.append(given)))
    assert run.run(options).status == "succeeded" and not started
    assert "gate: passed" in capsys.readouterr().out
    with pytest.raises(KubedetError):  # No step has run.
        run.run(replace(options, gate="coco/AP >= 0.1"))
    assert len(started) == 1


@pytest.mark.parametrize(("passed", "status"), [(False, "succeeded"), (True, "failed")])
def test_a_run_succeeds_without_an_export_only_if_the_gate_failed(record, folder, passed, status):
    progress = RunProgress(folder / "events")
    for name in ("download", "convert-to-shards", "train", "evaluate"):
        progress.steps[name].state = "done"
    record.gate["passed"] = passed
    progress.finish()
    record.end(progress)
    assert record.status == status and bool(record.error) == passed
    assert "held back by the gate" in describe_step(progress.steps["export"])


def failed(*names, nodes=()):
    tasks = [{"display_name": name, "state": "FAILED"} for name in names]
    children = [{"pod_name": f"kubedet-abcde-{node}"} for node in nodes]
    if children:
        tasks.append({"display_name": "executor", "state": "FAILED", "child_tasks": children})
    return tasks


@pytest.fixture
def judged(kfp_server):
    """Returns the error for a run that failed, as the API describes it."""

    def judge_(tasks, **further):
        kfp_server.runs = [{"run_id": "r", "display_name": "try"}]
        kfp_server.states = [("FAILED", tasks, further)]
        server = Server(Access.resolve())
        with pytest.raises(LaunchError) as caught:
            raise_if_failed(server, server.read_run("r"), Pods("r", ""), 0)
        return caught.value

    return judge_


def test_an_error_of_the_api_comes_first(judged, served_cluster):
    run_pods.put(
        served_cluster, "r", "train(0).executor(0)", main={"terminated": {"exitCode": 1, "message": "p"}}
    )
    error = judged([{"display_name": "train", "state": "FAILED", "error": {"message": "said"}}])
    assert error.message == "the run try failed\n  Train: said"


def test_a_driver_that_fails_is_named_with_its_cause(judged, served_cluster):
    log = "F1122 09:47:35.7 17 main.go:127] KFP driver: driver.Container(x) failed: no such Secret\nError: x"
    run_pods.put(served_cluster, "r", "train-driver(0)", main={"terminated": {"exitCode": 1}}, log=log)
    error = judged(failed("train-driver", "train-driver(0)", "exit-handler-1", "root"))
    assert error.message == "the run try failed\n  Train (its driver): no such Secret"
    assert "kubectl -n kubeflow logs -l pipeline/runid=r" in error.fix


def test_several_steps_have_their_own_remedies(judged, served_cluster):
    for name in ("train", "evaluate"):
        ended = {"terminated": {"exitCode": 1, "message": f"{name} broke\nbadly\n  fix: mend {name}"}}
        run_pods.put(served_cluster, "r", f"{name}(0).executor(0)", main=ended)
    error = judged(failed("train", "evaluate"))
    assert "\n  Train: train broke\n    badly\n    fix: mend train" in error.message
    assert "\n  Evaluate and decide: evaluate broke" in error.message and error.fix == "see the steps above"


def test_without_a_cause_the_log_is_named(judged, kfp_server):
    error = judged(failed("train-driver", "evaluate"))
    assert error.message == "the run try failed\n  Train (its driver): failed\n  Evaluate and decide: failed"
    assert "look at the log of Train (its driver) and Evaluate and decide: in the UI at http" in error.fix
    assert f"{kfp_server.url}/#/runs/details/r" in error.fix


def test_the_run_itself_may_say_why(judged):
    error = judged([], error={"message": "the workflow is too big"})
    assert "  run: the workflow is too big" in error.message
    assert "look at the log of the step that failed" in judged([]).fix


def test_all_problems_are_in_one_error():
    gate = "coco/AP >= x, coco/AP50 > y"
    options = Options("a/b", source="/missing", recipe="nope", nproc=0, gate=gate)
    with pytest.raises(ConfigError) as caught:
        check_options(options)
    lines = caught.value.message.splitlines()[1:]
    wrong = ["'a/b'", "nproc", "/missing does not exist", "unknown recipe 'nope'"]
    wrong += ["coco/AP >= x", "coco/AP50 > y"]
    assert len(lines) == len(wrong)
    assert all(part in line for part, line in zip(wrong, lines, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        Options("plain"),
        Options(
            "other",
            source="voc:/data/my set",
            recipe="small",
            nproc=4,
            data_root="s3://bucket/root",
            output="/runs",
            gate="coco/AP50 >= 0.5",
            overrides={
                "train.epochs": 3,
                "data.classes": ["a b"],
                "export.name": "10",
                "train.lr": 1e-4,
            },
        ),
    ],
)
def test_the_command_asks_for_the_same(options, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(options) or RunRecord("a", {}))
    words = shlex.split(options.command())
    if "--nproc" not in words:
        words += ["--nproc", str(options.nproc)]  # Its default on the command line depends on the machine.
    assert cli.main(words[1:]) == 0
    (again,) = seen
    assert again.name == options.name and again.arguments() == options.arguments()
