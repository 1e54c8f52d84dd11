"""PyTorchJobs of the Training Operator, v1."""

import re
from collections.abc import Iterable, Mapping

from components.launchers.backend import Phase
from components.launchers.cluster.kinds.kind import Body, Kind, Look, Standing, by_condition, holding
from components.launchers.render import check_pytorchjob, pytorchjob
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

    def manifests(self, job: JobSpec, exists: Look) -> list[Body]:
        """Return the job alone."""
        return [pytorchjob.manifest(job)]

    def problems(self, manifests: list[Body]) -> list[str]:
        """Check what the operator's webhook would refuse, and what the API server would prune."""
        return check_pytorchjob.problems(manifests[-1])

    def left_out(self, job: JobSpec) -> list[str]:
        """Return none: it supports all fields."""
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
        """Whether there is no master."""
        return "Master" not in _replicas(job)

    def standing(self, job: Body) -> Standing:
        """Read the conditions, except Running: the operator sets that late, and for one running pod."""
        conditions = holding(job)
        if standing := by_condition(conditions, _FINAL):
            return standing
        if (job["spec"].get("runPolicy") or {}).get("suspend"):
            return Standing(Phase.SUSPENDED)
        restarting = conditions.get("Restarting")
        if restarting is None:
            return Standing()
        return Standing(
            None, restarting.get("reason") or "", restarting.get("message") or "", restarting=True
        )

    def progress(self, job: Body) -> None:
        """Return None: a PyTorchJob has no field for it."""

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the job itself."""
        return ((self.title, name),)

    def last_exit(self, messages: Iterable[str], pod: str) -> str:
        """Read the operator's events: it deletes a pod that it replaces as soon as it has ended."""
        matches = [re.search(r"exited with code [1-9]\d*", text) for text in messages if pod in text]
        exits = [match.group() for match in matches if match]
        return exits[-1] if exits else ""


def _replicas(job: Body) -> dict[str, Body]:
    return job["spec"].get("pytorchReplicaSpecs") or {}
