"""Requests: which are retried, and the messages of refusals."""

import re

import pytest
from cluster.api import Fault

from components.launchers.cluster import pods
from components.launchers.cluster.client import ApiError, connect
from components.launchers.cluster.kinds import KINDS
from trainer.base.errors import EXIT_USAGE, ConfigError

KIND = KINDS["pytorchjob"]

WEBHOOK = 'admission webhook "validator.pytorchjob.training-operator.kubeflow.org" denied the request: [...]'


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 410}, {"status": 429}, {"status": 503}, {"drop": True}, {"delay": 1.2},
    ],
    ids=str,
)  # fmt: skip
def test_what_passes_is_tried_again(cluster, simulated, fault):
    times = 1 if "delay" in fault else 3
    simulated.faults.append(Fault("GET", "pods", times=times, **fault))
    assert pods.list_pods_of_job(cluster, KIND, "train", patience=5) == []
    assert len(simulated.requests("GET", "pods")) == times + 1


def test_retry_after_is_obeyed(cluster, simulated):
    simulated.faults.append(Fault("GET", "pods", status=429, retry_after=1))
    begun = simulated.clock.monotonic()
    pods.list_pods_of_job(cluster, KIND, "train")
    assert simulated.clock.monotonic() - begun >= 1.0


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=str)
def test_patience_has_an_end(cluster, simulated, fault):
    simulated.faults.append(Fault("GET", times=1000, **fault))
    begun = simulated.clock.monotonic()
    with pytest.raises(ApiError, match="cannot list pods in namespace default") as error:
        pods.list_pods_of_job(cluster, KIND, "train", patience=0.3)
    assert simulated.clock.monotonic() - begun < 20
    assert error.value.transient and error.value.exit_code == 1 and error.value.fix


def test_a_token_that_was_rotated_is_read_again(cluster, simulated):
    simulated.token = simulated.valid_token = "second"
    assert pods.list_pods_of_job(cluster, KIND, "train") == []
    assert len(simulated.seen) == 2


@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        (401, "Unauthorized", "log in"),
        (
            403,
            'User "me" cannot create resource "pytorchjobs"',
            r'apiGroups \["kubeflow.org"\].*verbs \["create"\]',
        ),
        (403, WEBHOOK, "change the job"),
        (403, "pods is forbidden: exceeded quota: gpus", "change the job"),
        (422, "spec.pytorchReplicaSpecs: Required value", "definition of such a job"),
    ],
)
def test_a_refusal_is_reported_once_and_with_a_remedy(cluster, simulated, status, message, fix):
    simulated.faults.append(Fault("POST", status=status, message=message, times=2))
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "train"}}
    with pytest.raises(ApiError) as error:
        cluster.request("create", KIND.resource, "train", body=body)
    messages = error.value
    assert f"cannot create pytorchjobs train in namespace default: {status}" in messages.message
    assert message in messages.message
    assert re.search(fix, messages.fix)
    assert messages.exit_code == EXIT_USAGE
    assert len(simulated.seen) == (2 if status == 401 else 1)


def test_what_belongs_to_the_cluster_is_in_no_namespace(cluster, simulated):
    simulated.denied.add(("list", "nodes"))
    with pytest.raises(ApiError) as error:
        cluster.call("list", "nodes", cluster.core.list_node)
    assert error.value.message.startswith("cannot list nodes: 403")
    assert error.value.fix.startswith("allow it with a ClusterRole: ")


def test_a_cluster_without_the_operator_is_not_one_without_the_job(cluster, simulated):
    assert cluster.find(KIND.resource, "train") is None
    simulated.installed.clear()
    with pytest.raises(ApiError, match="404") as error:
        cluster.find(KIND.resource, "train")
    assert "install the Training Operator" in error.value.fix


def test_a_missing_kubeconfig_is_reported(monkeypatch, tmp_path):
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no Kubernetes cluster"):
        connect()


@pytest.mark.parametrize("text", ["", "{", "a: b"], ids=repr)
def test_a_broken_kubeconfig_is_reported(tmp_path, monkeypatch, text):
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match=r"cannot use .*config to reach a cluster"):
        connect()


def test_the_namespace_is_the_given_one_or_the_kubeconfigs(served_cluster):
    served_cluster.write_kubeconfig(namespace="team")
    assert connect().namespace == "team"
    assert connect("mine").namespace == "mine"
