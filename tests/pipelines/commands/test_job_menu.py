"""`kubedet job menu`: keys and numbers stand for the commands of `kubedet job`."""

import sys

import pytest
from fake_exec import give_exec
from fake_pod import endless
from terminal import Terminal

from components.launchers.cluster.backend import ClusterBackend
from components.launchers.spec import JobSpec

MENU = [sys.executable, "-m", "pipelines.cli", "job", "menu"]


@pytest.mark.slow
def test_jobs_are_handled_by_keys(fake_cluster, tmp_path):
    give_exec(fake_cluster)
    fake_cluster.lives["a-master-0"] = endless
    ClusterBackend.connect().submit(JobSpec(name="a", image="i:1", command=("true",)))
    with Terminal(MENU, fake_cluster.environment | {"HOME": str(tmp_path)}) as terminal:
        terminal.until("q quit")
        terminal.type("x 7\r")
        terminal.until("number of a job")
        terminal.type("i 1\r")
        terminal.until("a-master-0")
        terminal.type("l 1\r")
        terminal.until("hello from a-master-0")
        terminal.type("\x03")
        terminal.until("q quit")
        terminal.type("e 1\r")
        terminal.type("echo by$((1+1)); exit\r")
        terminal.until("by2")
        terminal.until("q quit")
        terminal.type("d 1\r")
        terminal.until("[y/n]")
        terminal.type("y\r")
        terminal.until("deleted a")
        terminal.type(f"s {tmp_path / 'none.yaml'}\r")
        terminal.until("cannot read the specification")
        terminal.type("q\r")
    assert ClusterBackend.connect().list_jobs() == []


def test_a_menu_needs_a_terminal(kubedet):
    assert "needs a terminal" in kubedet("job", "menu")[2]
