"""The pod of a node: the same for every kind of job that starts containers."""

import math
from typing import Any

from components.launchers import kubernetes_names
from components.launchers.render import labels, process_environment
from components.launchers.spec import JobSpec

CONTAINER = "pytorch"
"""The container's name: the Training Operator asks for this one."""


_TMP = "/tmp"  # noqa: S108
"""What a program may count on being able to write."""

MAIN = "kubectl.kubernetes.io/default-container"
"""Annotation that tells which container of a pod is the job's own; others may be added to it."""


def template(
    job: JobSpec, *, container: str = CONTAINER, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the pod template of a job (Kubernetes' PodTemplateSpec, as it stands in YAML).

    Args:
        job: the job; its image must be named.
        container: the container's name.
        env: further variables, e.g. of the rendezvous; they win.
    """
    annotations = {"sidecar.istio.io/inject": "false", MAIN: container, **job.annotations}
    spec = {
        "schedulerName": job.scheduler or (labels.RUNAI_SCHEDULER if job.runai_queue else ""),
        "priorityClassName": job.priority_class,
        "serviceAccountName": job.service_account,
        # Training asks nothing of the cluster: no token that could be stolen, no list of services.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in job.image_pull_secrets],
        "nodeSelector": dict(job.node_selector),
        "tolerations": [_toleration(item) for item in job.tolerations],
        "topologySpreadConstraints": [_spread(item, job) for item in job.spread],
        "securityContext": _pod_security(job),
        "terminationGracePeriodSeconds": math.ceil(job.grace_seconds),
        "containers": [_container(job, container, env or {})],
        "volumes": _volumes(job),
    }
    return {
        "metadata": {"annotations": annotations, "labels": labels.of_pods(job)},
        "spec": _without_empty(spec),
    }


def _container(job: JobSpec, name: str, env: dict[str, str]) -> dict[str, Any]:
    # torchrun's own patience after SIGTERM is 30 s, whatever the pod is given to save its state.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(math.ceil(job.grace_seconds) - 5, 1))}
    plain = patience | process_environment.variables(job) | env
    secret = [
        {"name": item.name, "valueFrom": {"secretKeyRef": _without_empty(
            {"name": item.secret, "key": item.key, "optional": item.optional or None}
        )}}
        for item in job.secret_env
    ]  # fmt: skip
    return _without_empty(
        {
            "name": name,
            "image": job.image,
            "imagePullPolicy": job.image_pull_policy,
            "command": list(job.command),
            "workingDir": job.working_dir,
            "env": [{"name": name, "value": value} for name, value in plain.items()] + secret,
            "resources": _resources(job),
            "securityContext": _container_security(job),
            "volumeMounts": _mounts(job),
        }
    )


def _resources(job: JobSpec) -> dict[str, Any]:
    numbers = ({job.gpu_resource: job.gpus} if job.gpus else {}) | dict(job.resources)
    counted = {name: str(number) for name, number in numbers.items()}
    limits = {"cpu": job.cpu_limit, "memory": job.memory_limit, **counted}
    requests = {
        "cpu": job.cpu_request or job.cpu_limit,
        "memory": job.memory_request or job.memory_limit,
        **counted,
    }
    return _without_empty({"limits": _without_empty(limits), "requests": _without_empty(requests)})


def _pod_security(job: JobSpec) -> dict[str, Any]:
    return _without_empty(
        {
            "runAsUser": job.run_as_user,
            "runAsGroup": job.run_as_group,
            "fsGroup": job.fs_group,
            # A volume of millions of images is not walked through at every start.
            "fsGroupChangePolicy": "OnRootMismatch" if job.fs_group is not None else None,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )


def _container_security(job: JobSpec) -> dict[str, Any]:
    added = list(job.capabilities)
    if job.network.profile == "rdma" and "IPC_LOCK" not in added:
        added.append("IPC_LOCK")  # Registering memory with the network card locks it.
    # An image that runs as root needs root's capabilities to read volumes of other users.
    dropped = ["ALL"] if job.run_as_non_root else []
    capabilities = _without_empty({"drop": dropped, "add": added})
    # Here and not on the pod: the operator's own init container may run as root.
    root = {
        "runAsNonRoot": job.run_as_non_root or None,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": job.read_only_root or None,
    }
    return _without_empty({**root, "capabilities": capabilities})


def _claims(job: JobSpec) -> dict[str, str]:
    """A volume's name for each claim: one that is mounted twice is still one volume."""
    unique = dict.fromkeys(mount.claim for mount in job.mounts)
    return {claim: f"claim-{number}" for number, claim in enumerate(unique)}


def _mounts(job: JobSpec) -> list[dict[str, Any]]:
    volumes = _claims(job)
    mounts = [
        _without_empty(
            {
                "name": volumes[mount.claim],
                "mountPath": mount.path,
                "subPath": mount.sub_path,
                "readOnly": mount.read_only or None,
            }
        )
        for mount in job.mounts
    ]
    own = [
        *_optional(_has_shm(job), {"name": "shm", "mountPath": "/dev/shm"}),  # noqa: S108
        *_optional(_has_tmp(job), {"name": "tmp", "mountPath": _TMP}),
    ]
    return [*own, *mounts]


def _volumes(job: JobSpec) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", "sizeLimit": job.shared_memory}
    claims = [
        {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
        for claim, volume in _claims(job).items()
    ]
    own = [
        *_optional(_has_shm(job), {"name": "shm", "emptyDir": memory}),
        *_optional(_has_tmp(job), {"name": "tmp", "emptyDir": {}}),
    ]
    return [*own, *claims]


def _has_shm(job: JobSpec) -> bool:
    return kubernetes_names.amount(job.shared_memory) > 0


def _has_tmp(job: JobSpec) -> bool:
    """Tell whether a pod needs a folder to write to; a claim may be mounted there instead."""
    return job.read_only_root and all(mount.path.rstrip("/") != _TMP for mount in job.mounts)


def _optional(condition: bool, item: dict[str, Any]) -> list[dict[str, Any]]:
    return [item] if condition else []


def _toleration(item: Any) -> dict[str, Any]:
    return _without_empty(
        {"key": item.key, "operator": item.operator, "value": item.value, "effect": item.effect}
    )


def _spread(item: Any, job: JobSpec) -> dict[str, Any]:
    return {
        "maxSkew": item.max_skew,
        "topologyKey": item.topology_key,
        "whenUnsatisfiable": "DoNotSchedule" if item.required else "ScheduleAnyway",
        "labelSelector": {"matchLabels": {labels.LABEL_NAME: job.name}},
    }


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not asked for: the cluster's own default counts. False and 0 stay."""
    return {key: value for key, value in fields.items() if value not in (None, "", [], {})}
