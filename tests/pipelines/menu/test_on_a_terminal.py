"""The menu as its user starts it, where it gives the terminal to other programs."""

import os
import sys
import time

import pytest
from fake_exec import give_exec
from fake_pod import endless
from terminal import Terminal

from components.launchers.cluster.backend import ClusterBackend
from components.launchers.spec import JobSpec

MENU = [sys.executable, "-m", "pipelines.cli", "menu"]


@pytest.mark.slow
def test_logs_and_a_shell_take_the_terminal_and_give_it_back(fake_cluster, monkeypatch, tmp_path):
    give_exec(fake_cluster)
    monkeypatch.setenv("HOME", str(tmp_path))  # Where no file sets the shell's prompt.
    fake_cluster.lives["a-master-0"] = endless
    ClusterBackend.connect().submit(JobSpec(name="a", image="i:1", command=("true",)))
    with Terminal(MENU, fake_cluster.environment) as terminal:
        terminal.until("a-master-0")
        terminal.type("\r")
        terminal.until("Ctrl-C leaves the log")
        terminal.until("hello from a-master-0")
        terminal.type("\x03")
        terminal.until("press Enter for the menu")
        terminal.type("\r")
        terminal.until("a-master-0")
        terminal.type("e")
        terminal.until("$" if os.getuid() else "#")
        terminal.type("echo by$((1+1)); exit\r")
        terminal.until("by2")
        terminal.until("press Enter for the menu")
        terminal.type("\r")
        terminal.until("a-master-0")
        terminal.type("q")
        assert terminal.end() == 0
        assert terminal.echoes
    assert [name for name, _, _ in fake_cluster.executed] == ["a-master-0"]


@pytest.mark.slow
def test_the_log_of_a_failed_job_ends_though_a_peer_takes_its_time(fake_cluster):
    fake_cluster.termination_seconds = 600
    fake_cluster.lives |= {"a-master-0": endless, "a-worker-0": endless}
    ClusterBackend.connect().submit(JobSpec(name="a", image="i:1", command=("true",), nodes=2))
    while fake_cluster.pod("a-worker-0").body["status"]["phase"] != "Running":
        time.sleep(0.01)
    fake_cluster.pod("a-worker-0").say("out of luck")
    fake_cluster.pod("a-worker-0").exit(1)
    with Terminal(MENU, fake_cluster.environment) as terminal:
        terminal.until("failed")
        terminal.type("l")
        terminal.until("a-worker-0: out of luck", seconds=15)
        terminal.until("press Enter for the menu", seconds=15)
        terminal.type("\r")
        terminal.until("a-worker-0")
        terminal.type("q")
        assert terminal.end() == 0


def test_something_shows_before_the_libraries_are_imported(tmp_path):
    (tmp_path / "textual").mkdir()
    (tmp_path / "textual" / "__init__.py").write_text("raise SystemExit('importing textual')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Terminal(MENU, {**os.environ, "PYTHONPATH": path}) as terminal:
        assert "importing" not in terminal.until("kubedet menu: starting")
        terminal.until("importing textual")
