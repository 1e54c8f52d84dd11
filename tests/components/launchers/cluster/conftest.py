"""A backend that is quick to try again, before a fake API server."""

import pytest
from fake_pod import endless
from kinds import plain, pod_name

from components.launchers.backend import Timings
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from trainer.base.errors import KubedetError

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


@pytest.fixture
def timings():
    return QUICK


@pytest.fixture
def kind(request, fake_cluster):
    """The kind of jobs that the fake cluster knows: PyTorchJobs, unless the test is for `both`."""
    kind = KINDS[getattr(request, "param", "pytorchjob")]
    fake_cluster.installed = {kind.plural}
    return kind


@pytest.fixture
def first(kind):
    return pod_name(kind, 0)


@pytest.fixture
def second(kind):
    return pod_name(kind, 1)


@pytest.fixture
def backend(kind):
    return ClusterBackend.connect(timings=QUICK, kinds=[kind])


@pytest.fixture
def cluster(backend):
    return backend.cluster


@pytest.fixture
def job():
    def make(**fields):
        return JobSpec(**{"command": ("python", "-m", "trainer"), "name": "train", "image": "i:1", **fields})

    return make


@pytest.fixture
def run(backend, job):
    """Run a job; returns the lines that were said, `plain`. `lines` holds them if it fails."""

    def begin(backend=backend, **fields):
        begin.lines = []
        try:
            watch.run(backend, job(**fields), lambda line: begin.lines.append(plain(line)))
        except KubedetError as error:
            error.message = plain(error.message)
            raise
        return begin.lines

    begin.lines = []
    return begin


@pytest.fixture
def endless_pods(fake_cluster, first, second):
    fake_cluster.lives |= {first: endless, second: endless}
