"""A job for clusters without the Training Operator: an indexed Job and a headless Service.

The nodes find each other by torchrun's c10d rendezvous, which pod 0 holds. Source:
Kubernetes, "Jobs" (completion mode Indexed, pod failure policy) and "DNS for Services".
"""

from typing import Any

from components.launchers.render import labels, pod
from components.launchers.spec import JobSpec

PORT = 29400
"""Port of the rendezvous, torchrun's own."""

_WORTH_A_RETRY = [130, 134, 135, 137, 139, 143]
"""Exit codes of processes that a signal ended: interrupt, abort, bus error, kill, fault, term."""


def manifests(job: JobSpec) -> list[dict[str, Any]]:
    """Return the Service and the Job, as they stand in YAML."""
    return [_service(job), _job(job)]


def _metadata(job: JobSpec) -> dict[str, Any]:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **namespace, "labels": labels.of_job(job)}


def _service(job: JobSpec) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        # The nodes must find each other before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": {labels.LABEL_NAME: job.name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: JobSpec) -> dict[str, Any]:
    template = pod.template(job, env=rendezvous(job, f"{job.name}-0.{job.name}"))
    template["spec"] = {"subdomain": job.name, "restartPolicy": _restart(job), **template["spec"]}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0 if job.restart_policy == "Never" else job.backoff * job.nodes,
    }
    if job.restart_policy == "ExitCode":
        spec["podFailurePolicy"] = {"rules": _rules()}
    if job.ttl is not None:
        spec["ttlSecondsAfterFinished"] = job.ttl
    if job.deadline:
        spec["activeDeadlineSeconds"] = job.deadline
    if job.suspend or job.kueue_queue:
        spec["suspend"] = True
    spec["template"] = template
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _restart(job: JobSpec) -> str:
    return "OnFailure" if job.restart_policy == "OnFailure" else "Never"


def _rules() -> list[dict[str, Any]]:
    """The operator's ExitCode as rules: a lost node is replaced, a program's error fails the Job."""
    codes = {"containerName": pod.CONTAINER, "operator": "NotIn", "values": _WORTH_A_RETRY}
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]


def rendezvous(job: JobSpec, first: str) -> dict[str, str]:
    """Return torchrun's variables for nodes that meet by c10d.

    Args:
        job: the job.
        first: name under which the others find the first node.
    """
    bounds = f"{job.elastic.min_nodes}:{job.elastic.max_nodes}" if job.elastic else str(job.nodes)
    return {
        "PET_NNODES": bounds,
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
        "PET_RDZV_ID": job.name,
        "PET_MAX_RESTARTS": str(job.elastic.max_restarts if job.elastic else 0),
    }
