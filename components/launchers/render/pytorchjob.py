"""A job as a PyTorchJob of the Training Operator (kubeflow.org/v1, release 1.9)."""

from typing import Any

from components.launchers.render import labels, pod
from components.launchers.spec import JobSpec

API_VERSION = "kubeflow.org/v1"
KIND = "PyTorchJob"


def manifest(job: JobSpec) -> dict[str, Any]:
    """Return the PyTorchJob, as it stands in YAML.

    A fixed number of nodes is a Master and the rest Workers, an elastic job Workers only:
    the operator sets torchrun's variables (PET_*) accordingly.
    """
    namespace = {"namespace": job.namespace} if job.namespace else {}
    metadata = {"name": job.name, **namespace, "labels": labels.of_job(job)}
    spec: dict[str, Any] = {
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
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def _replicas(job: JobSpec) -> dict[str, Any]:
    if job.elastic:
        return {"Worker": _replica(job, job.nodes)}
    workers = {"Worker": _replica(job, job.nodes - 1)} if job.nodes > 1 else {}
    return {"Master": _replica(job, 1), **workers}


def _replica(job: JobSpec, number: int) -> dict[str, Any]:
    return {"replicas": number, "restartPolicy": job.restart_policy, "template": pod.template(job)}


def _run_policy(job: JobSpec) -> dict[str, Any]:
    policy: dict[str, Any] = {"cleanPodPolicy": job.clean_pods, "backoffLimit": job.backoff}
    if job.ttl is not None:
        policy["ttlSecondsAfterFinished"] = job.ttl
    if job.deadline:
        policy["activeDeadlineSeconds"] = job.deadline
    if job.suspend or job.kueue_queue:
        policy["suspend"] = True  # Kueue starts what it admits.
    return policy
