"""Fixtures: a cluster in this process on a clock that jumps, and one behind HTTP."""

import pytest

from cluster.api import Pool, SimulatedCluster
from cluster.server import ServedCluster
from components.launchers.backend import Timings
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.kinds import KINDS

ALL = tuple(KINDS.values())
QUICK = Timings(
    connect=1.0,
    read=1.0,
    patience=2.0,
    outage=2.0,
    backoff=0.02,
    longest_backoff=0.1,
    poll=0.05,
    heartbeat=30.0,
    quiet=0.5,
    drain=10.0,
    removal=1.2,
    stop=1.0,
    replaced=0.4,
)


def connect(simulated, timings, namespace="default"):
    """Return the launchers' client of a simulated cluster."""

    def load(client_configuration):
        client_configuration.host = "http://simulated"
        client_configuration.api_key["authorization"] = f"Bearer {simulated.valid_token}"

    return Cluster(load, namespace, timings, clock=simulated.clock, pool=Pool(simulated))


def connect_backend(simulated, kinds=ALL, timings=QUICK, namespace="default"):
    """Return the launchers' backend for a simulated cluster, without its guard process."""
    return ClusterBackend(connect(simulated, timings, namespace), kinds, start_guard=lambda *_: None)


@pytest.fixture
def simulated():
    """A simulated cluster."""
    return SimulatedCluster()


@pytest.fixture
def served_cluster(tmp_path, monkeypatch):
    """A simulated cluster behind HTTP; KUBECONFIG names it."""
    with ServedCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield cluster
