"""`kubedet job --backend runai`, against a program `runai` on the PATH."""

import json

import pytest
from cluster.runai import RunaiProgram
from event_lines import failed

from components.launchers import runai as launcher
from components.launchers.backend import Timings
from kubedet import cli


@pytest.fixture
def runai(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")  # No cluster is asked.
    monkeypatch.setattr(launcher, "Timings", lambda **_: Timings(poll=0.05, removal=2))
    return RunaiProgram(tmp_path)


@pytest.fixture
def kubedet(capfd, runai):
    """Runs a command line; returns exit code, stdout and stderr, the program's own included."""

    def run(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def job(kubedet):
    return lambda verb, *words: kubedet("job", verb, "--backend", "runai", *words)


SUBMIT = ("--name", "a", "--image", "i:1")


def test_status(job, runai):
    job("submit", *SUBMIT, "--", "true")
    runai.change("a", phase="Pending", phaseMessage="no GPUs are free")
    code, out, _ = job("status", "a")
    assert code == 0
    assert out.splitlines()[0] == "a  pending"
    assert "a-0-0" in out and "a: no GPUs are free" in out
    assert json.loads(job("status", "a", "--json")[1])["pods"][0]["node"] == "gpu-0"
    line = "2026-11-22T09:00:00Z " + failed("the loss is nan")
    runai.change("a", phase="Failed", pods=[{"name": "a-0-0", "status": "Error"}], lines={"a-0-0": [line]})
    assert "pod a-0-0 (rank 0) failed: the loss is nan" in job("status", "a")[1]


def test_logs_and_exec(job, runai):
    job("submit", *SUBMIT, "--nodes", 2, "--", "true")
    assert job("logs", "a")[1] == "a-master-0: hello from a-master-0\n"
    assert job("logs", "a", "--rank", 1)[1] == "hello from a-worker-0\n"
    assert job("exec", "a", "--rank", 1, "--", "sh", "-c", "echo $0; exit 5", "a b") == (5, "a b\n", "")


def test_mistakes(job, kubedet, runai, monkeypatch):
    code, _, err = job("status", "none", "--project", "team")
    assert code == 2
    assert (
        "error: Run:ai's project team has no job 'none'\n  fix: see `kubedet job list --backend runai" in err
    )
    assert "omit --namespace" in job("list", "-n", "x")[2]
    assert "add --backend runai" in kubedet("job", "list", "--project", "x")[2]
    runai.set_modes("old")
    assert "kubedet job render --target runai-submit-dist" in job("list")[2]
    (runai.folder / "runai").unlink()
    assert "the program runai is not on the PATH\n  fix: install" in job("list")[2]
