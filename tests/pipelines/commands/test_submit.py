"""`kubedet submit`: what is sent, what is shown, and how it ends."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import cli, wait

ARGUMENTS = [
    "submit", "--data-root", "s3://bucket/root", "--recipe", "coco_r50", "--nodes", "2", "--gpus", "8",
    "--set", "train.epochs=3", "--job", "cpu_limit=32", "--job", "network.profile=rdma",
    "--name", "try", "--data-version", "20261121",
]  # fmt: skip
PARAMETERS = {
    "data_root": "s3://bucket/root", "recipe": "coco_r50", "nodes": 2, "gpus": 8,
    "overrides": {"train.epochs": 3}, "job": {"cpu_limit": "32", "network": {"profile": "rdma"}},
    "data_version": "20261121",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(wait, "SECONDS", 0.01)


def test_a_run_is_started(kfp_server, capsys):
    assert cli.main(ARGUMENTS) == 0
    (run,) = kfp_server.runs
    assert run["display_name"] == "try" and run["runtime_config"]["parameters"] == PARAMETERS
    assert run["experiment_id"] == kfp_server.experiments[0]["experiment_id"]
    assert set(run["pipeline_spec"]) == {"pipeline_spec", "platform_spec"}
    shown = capsys.readouterr().out
    assert f"{kfp_server.url}/#/runs/details/{run['run_id']}" in shown
    assert "kfp --endpoint" in shown and "nodes=2" in shown
    assert f"kubedet job status kubedet-{run['run_id'].replace('-', '')[:12]}-train" in shown


def test_the_line_for_kfp_does_the_same(kfp_server, capsys, tmp_path):
    assert cli.main([*ARGUMENTS, "--dry-run"]) == 0
    assert kfp_server.requests == []
    *_, compiled, run = [line.strip() for line in capsys.readouterr().out.splitlines()]
    tools = Path(sys.executable).parent
    for line in (compiled, run):
        tool, *words = shlex.split(line)
        done = subprocess.run(
            [tools / tool, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (sent,) = kfp_server.runs
    assert sent["runtime_config"]["parameters"] == PARAMETERS and sent["display_name"] == "try"
    assert cli.main(ARGUMENTS) == 0
    assert kfp_server.runs[1]["pipeline_spec"] == sent["pipeline_spec"]
    assert kfp_server.runs[1]["experiment_id"] == sent["experiment_id"]


def test_a_dry_run_needs_no_cluster(kfp_server, monkeypatch, capsys):
    monkeypatch.delenv("KFP_ENDPOINT")
    assert cli.main(["submit", "--claim", "sets", "--dry-run"]) == 0
    assert "kubedet compile --volume" in capsys.readouterr().out
    assert cli.main(["submit", "--claim", "sets"]) == 2
    assert "no Kubeflow Pipelines to talk to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "nope"], "no recipe 'nope'"),
        (["--set", "train.epochs"], "--set 'train.epochs' is not key=value"),
        (["--job", "memory_limit"], "--job 'memory_limit' is not key=value"),
        (["--job", "memory=1Gi"], "memory: no such field"),
        (["--data-root", "/home/me"], "data_root: no pod finds /home/me"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(kfp_server, capsys, arguments, said):
    assert cli.main([*ARGUMENTS, *arguments]) == 2
    assert said in capsys.readouterr().err and kfp_server.requests == []


def test_waiting_shows_the_steps(kfp_server, capsys):
    running = [
        {"display_name": "download", "state": "SUCCEEDED"},
        {"display_name": "train", "state": "RUNNING"},
    ]
    inner = [{"display_name": "train-driver", "state": "SUCCEEDED"}]
    kfp_server.states = ["PENDING", ("RUNNING", running), ("RUNNING", running + inner), "SUCCEEDED"]
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    lines = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[-5:]]
    assert lines == [
        "run: pending",
        "Download images: succeeded",
        "Train: running",
        "run: running",
        "run: succeeded",
    ]


def test_a_failed_run_is_told_and_fails(kfp_server, capsys):
    failed = [{"display_name": "train", "state": "FAILED", "error": {"message": "pod was OOMKilled"}}]
    kfp_server.states = ["RUNNING", ("FAILED", failed)]
    assert cli.main([*ARGUMENTS, "--wait"]) == 1
    said = capsys.readouterr().err
    assert "the run try failed\n  Train: pod was OOMKilled" in said and "fix: look at the log" in said


@pytest.mark.parametrize(("state", "said"), [("CANCELED", "was stopped"), ("SKIPPED", "ended as skipped")])
def test_a_run_that_was_stopped_has_not_succeeded(kfp_server, capsys, state, said):
    kfp_server.states = [state]
    assert cli.main([*ARGUMENTS, "--wait"]) == 1
    assert said in capsys.readouterr().err


def test_waiting_outlives_a_server_that_is_away(kfp_server, capsys):
    kfp_server.failures = [("GET", "/runs/", 503, "no upstream"), ("GET", "/runs/", 429, "slow down")]
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    assert capsys.readouterr().out.count("no answer, trying again") == 1


def test_waiting_ends_when_the_server_stays_away(kfp_server, capsys, monkeypatch):
    monkeypatch.setattr(wait, "PATIENCE", 0.0)
    kfp_server.failures = [("GET", "/runs/", 503, "no upstream")] * 3
    assert cli.main([*ARGUMENTS, "--wait"]) == 1
    assert "no upstream" in capsys.readouterr().err


def test_a_token_that_is_refused_ends_the_waiting(kfp_server, capsys):
    kfp_server.failures = [("GET", "/runs/", 401, {"message": "expired"})]
    assert cli.main([*ARGUMENTS, "--wait"]) == 2
    assert "401 Unauthorized: expired" in capsys.readouterr().err


def test_who_stops_waiting_learns_that_the_run_goes_on(kfp_server, capsys, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    kfp_server.states = ["RUNNING"]
    monkeypatch.setattr(wait.time, "sleep", interrupted)
    assert cli.main([*ARGUMENTS, "--wait"]) == 130
    assert "the run goes on: http" in capsys.readouterr().err
