"""The launcher's Role grants exactly the calls that the launcher makes."""

import pytest
from cluster.api import Fault
from cluster.kueue import Kueue
from cluster.pods import endless
from patience import until

from components.launchers.backend import Timings
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec

QUICK = Timings(backoff=0.02, longest_backoff=0.1, poll=0.05, patience=2.0)
JOB = {"command": ("true",), "image": "i", "backoff": 3}  # A TrainJob then brings a runtime.


@pytest.fixture
def step(served_cluster, monkeypatch):
    """The launcher runs in the pod of a run's step; Kueue and both kinds of jobs are there."""
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u-1"}
    spec = {"containers": [{"name": "main", "image": "i"}]}
    metadata = {"name": "step-pod", "ownerReferences": [owner]}
    served_cluster.add("pods", "default", {"metadata": metadata, "spec": spec, "status": {}})
    served_cluster.add("workflows", "default", {"metadata": {"name": "run-x"}, "spec": {}})
    monkeypatch.setenv("KFP_POD_NAME", "step-pod")
    Kueue(served_cluster)
    served_cluster.installed = {kind.plural for kind in KINDS.values()}


def use(served_cluster, backend, kind):
    """Do what launchers and the operator's commands do with jobs of a kind."""
    watch.run(backend, JobSpec(name=f"{kind}-well", **JOB), print)
    served_cluster.lives |= dict.fromkeys([f"{kind}-long-worker-0", f"{kind}-long-node-0-0"], endless)
    backend.submit(JobSpec(name=f"{kind}-long", **JOB))
    backend.submit(JobSpec(name=f"{kind}-waits", kueue_queue="gpus", command=("true",), image="i"))
    until(lambda: served_cluster.requests("GET", "workflows?watch=true"))
    for job in backend.list_jobs():
        backend.explain(job)
    backend.stop(f"{kind}-long")
    served_cluster.faults.append(Fault("POST", f"/{kind}s", status=422, message="refused"))
    with pytest.raises(ApiError, match="refused"):
        backend.submit(JobSpec(name=f"{kind}-refused", **JOB))


def test_the_launcher_role_grants_exactly_what_is_used(the, served_cluster, step):
    for kind in KINDS.values():
        use(served_cluster, ClusterBackend.connect(timings=QUICK, kinds=[kind]), kind.name)
    rules = the("Role", "kubedet-launcher")["rules"]
    granted = {(verb, what) for rule in rules for what in rule["resources"] for verb in rule["verbs"]}
    # Of Kueue itself the launcher reads what the user may read: no namespace's Role grants it.
    assert served_cluster.asked - {("get", "deployments"), ("get", "configmaps")} == granted
