"""What the tests of the commands share."""

import pytest

from components.launchers.backend import Timings
from components.launchers.cluster import client
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS

ALL = tuple(KINDS.values())
FAST = Timings(backoff=0.01, poll=0.05, patience=0.2)


@pytest.fixture
def kubedet(kubedet, monkeypatch, served_cluster):
    """Runs a command line against the cluster, in haste; returns exit code, stdout and stderr."""

    def connect(cls, namespace="", *, kinds=ALL, timings=None):
        return cls(client.connect(namespace, timings=FAST), kinds)

    hasty = classmethod(connect)
    monkeypatch.setattr(ClusterBackend, "connect", hasty)
    return kubedet
