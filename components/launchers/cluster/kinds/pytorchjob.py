"""PyTorchJobs of the Training Operator (kubeflow.org/v1, release 1.9)."""

from collections.abc import Mapping

from components.launchers import pod_template
from components.launchers.backend import Phase
from components.launchers.cluster.kinds.kind import Body, Exists, Kind, Standing, by_condition, holding
from components.launchers.spec import JobSpec

_PHASES = {
    "Failed": Phase.FAILED, "Succeeded": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED, "Restarting": None,
}  # fmt: skip
"""Not Running: the operator sets that late, and for one running pod."""
_TYPE = "training.kubeflow.org/replica-type"
_INDEX = "training.kubeflow.org/replica-index"


class PyTorchJob(Kind):
    """A Master and Workers, or for an elastic job Workers alone: the operator sets torchrun's variables."""

    name = "pytorchjob"
    title = "PyTorchJob"
    controller = "the Training Operator (v1.9)"
    group, version, plural = "kubeflow.org", "v1", "pytorchjobs"
    pod_label = "training.kubeflow.org/job-name"

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        spec: Body = {
            "nprocPerNode": str(job.processes),
            "runPolicy": _run_policy(job),
            "pytorchReplicaSpecs": _replicas(job),
        }
        if job.elastic:
            spec["elasticPolicy"] = {
                "minReplicas": job.elastic.min_nodes,
                "maxReplicas": job.elastic.max_nodes,
                "maxRestarts": job.elastic.max_restarts,
                "rdzvBackend": "c10d",
                "rdzvId": job.name,
            }
        return [self._body(pod_template.job_metadata(job), spec)]

    def _body(self, metadata: Body, spec: Body) -> Body:
        return {
            "apiVersion": f"{self.group}/{self.version}",
            "kind": self.title,
            "metadata": metadata,
            "spec": spec,
        }

    def probe(self) -> Body:
        container = {"name": pod_template.CONTAINER, "image": "none"}
        replica = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
        return self._body({"generateName": "kubedet-probe-"}, {"pytorchReplicaSpecs": {"Master": replica}})

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        has_master = "Master" in job["spec"]["pytorchReplicaSpecs"]
        return int(labels.get(_INDEX, 0)) + (has_master and labels.get(_TYPE) == "worker")

    def nodes(self, job: Body) -> int:
        return sum(item.get("replicas", 1) for item in job["spec"]["pytorchReplicaSpecs"].values())

    def bounds(self, job: Body) -> tuple[int, int] | None:
        if "Master" in job["spec"]["pytorchReplicaSpecs"]:
            return None
        policy, nodes = job["spec"].get("elasticPolicy") or {}, self.nodes(job)
        return policy.get("minReplicas") or nodes, policy.get("maxReplicas") or nodes

    def standing(self, job: Body) -> Standing:
        conditions = holding(job)
        suspended = (job["spec"].get("runPolicy") or {}).get("suspend")
        if suspended and not conditions.keys() & {"Failed", "Succeeded", "Suspended"}:
            return Standing(Phase.SUSPENDED)
        return by_condition(conditions, _PHASES) or Standing()


def _replicas(job: JobSpec) -> Body:
    if job.elastic:
        return {"Worker": _replica(job, job.nodes)}
    workers = {"Worker": _replica(job, job.nodes - 1)} if job.nodes > 1 else {}
    return {"Master": _replica(job, 1), **workers}


def _replica(job: JobSpec, number: int) -> Body:
    return {"replicas": number, "restartPolicy": job.restart_policy, "template": pod_template.template(job)}


def _run_policy(job: JobSpec) -> Body:
    policy: Body = {"cleanPodPolicy": job.clean_pods, "backoffLimit": job.backoff}
    if job.ttl is not None:
        policy["ttlSecondsAfterFinished"] = job.ttl
    if job.deadline:
        policy["activeDeadlineSeconds"] = job.deadline
    if job.suspend or job.kueue_queue:
        policy["suspend"] = True  # Kueue starts what it admits.
    return policy
