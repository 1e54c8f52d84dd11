"""Status of a PyTorchJob and its pods."""

import pytest
from kinds import check_nodes

from components.launchers.backend import Phase
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import Elastic

KIND = KINDS["pytorchjob"]


@pytest.fixture
def body(job):
    """Return a job's body, with conditions."""

    def make(*held, **fields):
        (body,) = KIND.manifests(job(**fields), lambda *_: False)
        conditions = [{"type": name, "status": "True", "reason": "R", "message": "m"} for name in held]
        return {**body, "status": {"conditions": conditions}}

    return make


def labels(kind, index):
    return {"training.kubeflow.org/replica-type": kind, "training.kubeflow.org/replica-index": str(index)}


def test_the_master_is_rank_0_and_of_workers_alone_the_first_is(body):
    pods = [labels("master", 0), labels("worker", 0), labels("worker", 1)]
    assert [KIND.rank(body(nodes=3), item) for item in pods] == [0, 1, 2]
    elastic = body(nodes=2, elastic=Elastic(min_nodes=1, max_nodes=2))
    assert [KIND.rank(elastic, item) for item in pods[1:]] == [0, 1]


def test_nodes_and_how_many_are_needed(body):
    check_nodes(KIND, body)


@pytest.mark.parametrize(
    ("held", "phase"),
    [
        (["Created", "Running"], None), (["Failed"], Phase.FAILED), (["Succeeded"], Phase.SUCCEEDED),
        (["Suspended"], Phase.SUSPENDED), (["Restarting"], None),
    ],
)  # fmt: skip
def test_state_by_conditions(body, held, phase):
    state = KIND.state(body(*held))
    assert (state.phase, state.restarting) == (phase, held == ["Restarting"])
    assert state.reason == ("R" if phase or state.restarting else "")
    assert KIND.state(body(kueue_queue="q")).phase is Phase.SUSPENDED


def test_it_is_made_alone_leaves_nothing_out_and_has_no_progress(job, body):
    spec = job(clean_pods="All", ttl=60)
    assert [item["kind"] for item in KIND.manifests(spec, lambda *_: True)] == ["PyTorchJob"]
    assert KIND.left_out(spec) == [] and KIND.state(body()).progress is None
