"""Commands in pods, over a real websocket."""

import socket
import sys

import pytest
from cluster import exec_stream
from cluster.pods import endless
from terminal import Terminal

from components.launchers.backend import PodStatus
from components.launchers.cluster import pod_exec
from components.launchers.cluster.client import connect
from trainer.base.errors import ConfigError, LaunchError

POD = PodStatus("p-worker-0", "Running", 0, container="pytorch")


@pytest.fixture
def cluster(served_cluster):
    """A client of a cluster that has the pod p-worker-0."""
    served_cluster.lives["p-worker-0"] = endless
    pod = {"metadata": {}, "spec": {"containers": []}}
    replicas = {"Worker": {"replicas": 1, "template": pod}}
    served_cluster.create_job(
        "default", {"metadata": {"name": "p"}, "spec": {"pytorchReplicaSpecs": replicas}}
    )
    return connect()


def run(cluster, *command):
    return pod_exec.run_attached(cluster, POD, command)


def test_a_command_runs_in_the_container_that_trains(cluster, served_cluster, capfdbinary):
    assert run(cluster, "printf", "%s|", "a b", "$HOME", "ü") == 0
    assert capfdbinary.readouterr().out.decode() == "a b|$HOME|ü|"
    assert served_cluster.executed == [("p-worker-0", ["pytorch"], ["printf", "%s|", "a b", "$HOME", "ü"])]


def test_a_large_output_arrives_whole(cluster, capfdbinary):
    assert run(cluster, "seq", "100000") == 0
    assert capfdbinary.readouterr().out.split() == [b"%d" % number for number in range(1, 100001)]


def test_without_a_terminal_both_outputs_are_passed_on(cluster, capfdbinary):
    assert run(cluster, "sh", "-c", "echo out; echo err >&2; exit 3") == 3
    assert capfdbinary.readouterr() == (b"out\n", b"err\n")


def test_a_program_that_is_not_there_is_reported(cluster):
    with pytest.raises(ConfigError, match=r"p-worker-0 cannot run nonsense.*executable file not found"):
        run(cluster, "nonsense")


def test_a_missing_permission_names_the_verbs(cluster, served_cluster):
    served_cluster.denied.add(("create", "pods/exec"))
    with pytest.raises(ConfigError, match="is forbidden") as raised:
        run(cluster, "true")
    assert 'resources ["pods/exec"], verbs ["create", "get"]' in raised.value.fix


def test_a_connection_that_breaks_is_reported(cluster, monkeypatch):
    monkeypatch.setattr(exec_stream, "serve", lambda connection, *_: connection.shutdown(socket.SHUT_RDWR))
    with pytest.raises(LaunchError, match="lost the connection to p-worker-0"):
        run(cluster, "true")


@pytest.mark.slow
def test_on_a_terminal_the_keys_the_size_and_ctrl_c_are_the_pods(cluster, served_cluster, monkeypatch):
    script = (
        "from components.launchers.cluster import pod_exec, client; import sys;"
        "from components.launchers.backend import PodStatus;"
        "sys.exit(pod_exec.run_attached(client.connect(), "
        "PodStatus('p-worker-0', 'Running', 0, container='pytorch'), ['sh']))"
    )
    monkeypatch.setenv("PS1", "> ")
    with Terminal([sys.executable, "-c", script], served_cluster.environment, size=(33, 77)) as terminal:
        terminal.until("> ")
        terminal.type("stty size; tty -s && echo ter''minal\r")
        terminal.until("33 77")
        terminal.until("terminal")
        # Once it speaks itself it is what the key ends: before that the shell would wait for it.
        terminal.type("sh -c 'echo re\"\"ady; exec sleep 60' && echo sle''pt\r")
        terminal.until("ready")
        terminal.type("\x03")
        assert "slept" not in terminal.until("> ")  # What comes before its prompt the shell may drop.
        terminal.type("echo wo''ken; exit 5\r")
        terminal.until("woken")
        assert terminal.end() == 5
        assert terminal.echoes
