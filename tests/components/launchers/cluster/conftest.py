"""A backend of a simulated cluster, that is quick to try again."""

import pytest
from cluster.fixtures import QUICK, connect_backend
from cluster.pods import endless
from kinds import plain, pod_name

from components.launchers.cluster import watch
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from trainer.base.errors import KubedetError


@pytest.fixture
def timings():
    return QUICK


@pytest.fixture
def kind(request, simulated):
    """The kind of jobs that the cluster knows: PyTorchJobs, unless the test is for `both`."""
    kind = KINDS[getattr(request, "param", "pytorchjob")]
    simulated.installed = {kind.plural}
    return kind


@pytest.fixture
def first(kind):
    return pod_name(kind, 0)


@pytest.fixture
def second(kind):
    return pod_name(kind, 1)


@pytest.fixture
def backend(kind, simulated):
    return connect_backend(simulated, [kind])


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
def endless_pods(simulated, first, second):
    simulated.lives |= {first: endless, second: endless}
