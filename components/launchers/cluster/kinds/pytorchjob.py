"""PyTorchJobs of the Training Operator, v1: what the launcher must know of them."""

import re
from collections.abc import Iterable, Mapping

from components.launchers.backend import Phase
from components.launchers.cluster.kinds.kind import Body, Kind, Look, Standing, by_condition, holding
from components.launchers.render import check, pytorchjob
from components.launchers.spec import JobSpec

_FINAL = {"Failed": Phase.FAILED, "Succeeded": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED}
_TYPE = "training.kubeflow.org/replica-type"
_INDEX = "training.kubeflow.org/replica-index"


class PyTorchJob(Kind):
    """A Master and Workers; of an elastic job Workers alone."""

    name = "pytorchjob"
    title = "PyTorchJob"
    controller = "the Training Operator (v1.9)"
    group, version, plural = "kubeflow.org", "v1", "pytorchjobs"
    pod_label = "training.kubeflow.org/job-name"

    def manifests(self, job: JobSpec, there: Look) -> list[Body]:
        """Return the job alone."""
        return [pytorchjob.manifest(job)]

    def problems(self, manifests: list[Body]) -> list[str]:
        """See what the operator's webhook would refuse, and what its API server would cut off."""
        return check.problems(manifests[-1])

    def left_out(self, job: JobSpec) -> list[str]:
        """Leave out nothing."""
        return []

    def probe(self) -> Body:
        """Return a job of one pod."""
        container = {"name": "pytorch", "image": "none"}
        replica = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
        return {
            "apiVersion": pytorchjob.API_VERSION,
            "kind": pytorchjob.KIND,
            "metadata": {"generateName": "kubedet-probe-"},
            "spec": {"pytorchReplicaSpecs": {"Master": replica}},
        }

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        """Count the master, where there is one, before the workers."""
        return int(labels.get(_INDEX, 0)) + ("Master" in _replicas(job) and labels.get(_TYPE) == "worker")

    def nodes(self, job: Body) -> int:
        """Add the replicas of both types."""
        return sum(item.get("replicas", 1) for item in _replicas(job).values())

    def needed(self, job: Body) -> int:
        """Return all nodes, or the fewest of an elastic job."""
        return (job["spec"].get("elasticPolicy") or {}).get("minReplicas") or self.nodes(job)

    def elastic(self, job: Body) -> bool:
        """Look for a master."""
        return "Master" not in _replicas(job)

    def standing(self, job: Body) -> Standing:
        """Read the conditions; that it runs the operator says as soon as one pod does, and says it late."""
        conditions = holding(job)
        if found := by_condition(conditions, _FINAL):
            return found
        if (job["spec"].get("runPolicy") or {}).get("suspend"):
            return Standing(Phase.SUSPENDED)
        again = conditions.get("Restarting")
        if again is None:
            return Standing()
        return Standing(None, again.get("reason") or "", again.get("message") or "", restarting=True)

    def progress(self, job: Body) -> None:
        """Know nothing: a PyTorchJob has no field for it."""

    def tell_of(self, name: str) -> tuple[tuple[str, str], ...]:
        """Name the job itself."""
        return ((self.title, name),)

    def last_exit(self, messages: Iterable[str], pod: str) -> str:
        """Read the operator's own words: it deletes a pod that is to be made anew as soon as it has ended."""
        ends = [re.search(r"exited with code [1-9]\d*", text) for text in messages if pod in text]
        told = [end.group() for end in ends if end]
        return told[-1] if told else ""


def _replicas(job: Body) -> dict[str, Body]:
    return job["spec"].get("pytorchReplicaSpecs") or {}
