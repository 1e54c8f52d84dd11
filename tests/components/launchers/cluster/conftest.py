"""A backend that is quick to try again, before a fake API server."""

import pytest

from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings

QUICK = Timings(
    connect=1.0, read=1.0, patience=2.0, outage=2.0, backoff=0.02, longest_backoff=0.1, poll=0.05,
    heartbeat=30.0, quiet=0.5, drain=1.0, removal=2.0, stop=1.0,
    lasting=1.0, replaced=0.4,
)  # fmt: skip


@pytest.fixture
def timings():
    return QUICK


@pytest.fixture
def backend(fake_cluster):
    """A ClusterBackend of PyTorchJobs for the fake cluster."""
    return ClusterBackend.connect(timings=QUICK, kinds=[KINDS["pytorchjob"]])


@pytest.fixture
def cluster(backend):
    """The Cluster of the backend."""
    return backend.cluster


@pytest.fixture
def job():
    """A job of the name `train`, with further fields."""

    def make(**fields):
        return JobSpec(**{"command": ("python", "-m", "trainer"), "name": "train", "image": "i:1", **fields})

    return make


@pytest.fixture
def run(backend, job):
    """Run a job; returns the lines that were said. `lines` holds them if it fails."""

    def begin(backend=backend, **fields):
        begin.lines = []
        watch.run(backend, job(**fields), begin.lines.append)
        return begin.lines

    begin.lines = []
    return begin
