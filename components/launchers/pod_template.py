"""The pod of a node, for every kind of job. Variables: NCCL's user guide; PyTorch's "CUDA semantics"."""

import math
from dataclasses import asdict
from typing import Any

from components.launchers import kubernetes_names
from components.launchers.spec import JobSpec

Body = dict[str, Any]  # An object of the cluster, as it is written in YAML.

LABEL_SPEC = "kubedet/spec-hash"  # Hash of the specification, by which a job is adopted or replaced.
LABEL_NAME = "app.kubernetes.io/instance"  # Name of the job, on each of its pods.
LABEL_MANAGED, MANAGED_BY = "app.kubernetes.io/managed-by", "kubedet"  # Other objects are never touched.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"  # Kueue's queue that admits a job.


def pod_labels(job: JobSpec) -> dict[str, str]:
    """Return the labels of every pod of a job."""
    managed = {"app.kubernetes.io/name": "kubedet", LABEL_MANAGED: MANAGED_BY, LABEL_NAME: job.name}
    # Istio looks at the label, older ones at the annotation: a sidecar breaks the rendezvous.
    mesh = {"sidecar.istio.io/inject": "false"}
    return mesh | ({"runai/queue": job.runai_queue} if job.runai_queue else {}) | dict(job.labels) | managed


def job_metadata(job: JobSpec) -> Body:
    """Return the metadata of the job itself."""
    namespace = {"namespace": job.namespace} if job.namespace else {}
    queue = {LABEL_QUEUE: job.kueue_queue} if job.kueue_queue else {}
    pods = {key: value for key, value in pod_labels(job).items() if key != "sidecar.istio.io/inject"}
    return {"name": job.name, **namespace, "labels": pods | queue | {LABEL_SPEC: job.fingerprint}}


ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATORS = frozenset((ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"))  # The older name wins.
EXPANDABLE = "expandable_segments:True"  # Otherwise batches of several sizes fragment a GPU's memory.


def process_variables(job: JobSpec) -> dict[str, str]:
    """Return the variables of every process: of network profile and allocator, and the job's, which win."""
    network = job.network
    named = {*job.env, *(item.name for item in job.secret_env)}
    nvidia = job.gpus > 0 and job.gpu_resource.startswith("nvidia.com/")
    allocator = EXPANDABLE if nvidia and not named & ALLOCATORS else ""
    values: dict[str, str] = {ALLOCATOR: allocator, "NCCL_DEBUG": network.debug}
    values |= {"NCCL_SOCKET_IFNAME": network.interface, "GLOO_SOCKET_IFNAME": network.interface}
    if network.profile == "tcp":
        values["NCCL_IB_DISABLE"] = "1"
        values["NCCL_SOCKET_NTHREADS"] = str(network.socket_threads or "")
        values["NCCL_NSOCKS_PERTHREAD"] = str(network.sockets_per_thread or "")
    if network.profile == "rdma":
        values["NCCL_IB_DISABLE"] = "0"
        values["NCCL_IB_HCA"] = network.hca
        values["NCCL_IB_GID_INDEX"] = str(network.gid_index) if network.gid_index >= 0 else ""
    return {name: value for name, value in values.items() if value} | dict(job.env)


def limits(job: JobSpec) -> Body:
    """Return the fields of a job, of whatever kind, by which it starts late, is stopped and is deleted."""
    suspended = job.suspend or bool(job.kueue_queue) or None  # Kueue starts what it admits.
    fields = {"ttlSecondsAfterFinished": job.ttl, "activeDeadlineSeconds": job.deadline or None}
    return _without_empty({**fields, "suspend": suspended})


PORT = 29400  # Of torchrun's c10d rendezvous.


def rendezvous(job: JobSpec, first: str) -> dict[str, str]:
    """Return torchrun's variables for nodes that meet by c10d at the node of the name `first`."""
    bounds = f"{job.elastic.min_nodes}:{job.elastic.max_nodes}" if job.elastic else str(job.nodes)
    return {
        "PET_NNODES": bounds,
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
        "PET_RDZV_ID": job.name,
        "PET_MAX_RESTARTS": str(job.elastic.max_restarts if job.elastic else 0),
    }


CONTAINER = "pytorch"  # The Training Operator requires this name.
# Annotation: the container that trains; others may be added.
MAIN = "kubectl.kubernetes.io/default-container"
_TMP = "/tmp"  # noqa: S108


def template(job: JobSpec, *, container: str = CONTAINER, env: dict[str, str] | None = None) -> Body:
    """Return the pod template of a job (Kubernetes' PodTemplateSpec); `env` wins over the job's variables."""
    volumes, mounts = _volumes(job)
    annotations = {"sidecar.istio.io/inject": "false", MAIN: container, **job.annotations}
    spec = {
        "schedulerName": job.scheduler or ("runai-scheduler" if job.runai_queue else ""),
        "priorityClassName": job.priority_class,
        "serviceAccountName": job.service_account,
        # Training asks nothing of the cluster: no token that could be stolen, no list of services.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in job.image_pull_secrets],
        "nodeSelector": dict(job.node_selector),
        "tolerations": [_without_empty(asdict(item)) for item in job.tolerations],
        "topologySpreadConstraints": [
            {
                "maxSkew": item.max_skew,
                "topologyKey": item.topology_key,
                "whenUnsatisfiable": "DoNotSchedule" if item.required else "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_NAME: job.name}},
            }
            for item in job.spread
        ],
        "securityContext": _without_empty(
            {
                "runAsUser": job.run_as_user,
                "runAsGroup": job.run_as_group,
                "fsGroup": job.fs_group,
                # A volume of millions of images is not walked through at every start.
                "fsGroupChangePolicy": "OnRootMismatch" if job.fs_group is not None else None,
                "seccompProfile": {"type": "RuntimeDefault"},
            }
        ),
        "terminationGracePeriodSeconds": math.ceil(job.grace_seconds),
        "containers": [_container(job, container, env or {}, mounts)],
        "volumes": volumes,
    }
    return {"metadata": {"annotations": annotations, "labels": pod_labels(job)}, "spec": _without_empty(spec)}


def _container(job: JobSpec, name: str, env: dict[str, str], mounts: list[Body]) -> Body:
    # torchrun's own patience after SIGTERM is 30 s, whatever the pod is given to save its state.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(math.ceil(job.grace_seconds) - 5, 1))}
    plain = patience | process_variables(job) | env
    secret = [
        {
            "name": item.name,
            "valueFrom": {
                "secretKeyRef": _without_empty(
                    {"name": item.secret, "key": item.key, "optional": item.optional or None}
                )
            },
        }
        for item in job.secret_env
    ]
    numbers = ({job.gpu_resource: job.gpus} if job.gpus else {}) | dict(job.resources)
    counted = {name: str(number) for name, number in numbers.items()}
    limits = {"cpu": job.cpu_limit, "memory": job.memory_limit, **counted}
    requests = {
        "cpu": job.cpu_request or job.cpu_limit,
        "memory": job.memory_request or job.memory_limit,
        **counted,
    }
    added = list(job.capabilities)
    if job.network.profile == "rdma" and "IPC_LOCK" not in added:
        added.append("IPC_LOCK")  # Registering memory with the network card locks it.
    # An image that runs as root needs root's capabilities to read volumes of other users.
    dropped = ["ALL"] if job.run_as_non_root else []
    return _without_empty(
        {
            "name": name,
            "image": job.image,
            "imagePullPolicy": job.image_pull_policy,
            "command": list(job.command),
            "workingDir": job.working_dir,
            "env": [{"name": name, "value": value} for name, value in plain.items()] + secret,
            "resources": _without_empty(
                {"limits": _without_empty(limits), "requests": _without_empty(requests)}
            ),
            "securityContext": _without_empty(
                {
                    "runAsNonRoot": job.run_as_non_root or None,
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": job.read_only_root or None,
                    "capabilities": _without_empty({"drop": dropped, "add": added}),
                }
            ),
            "volumeMounts": mounts,
        }
    )


def _volumes(job: JobSpec) -> tuple[list[Body], list[Body]]:
    """Return the volumes of a pod and the mounts of its container: claims, /dev/shm and /tmp."""
    volumes: list[Body] = []
    mounts: list[Body] = []
    if kubernetes_names.amount(job.shared_memory) > 0:
        memory = {"medium": "Memory", "sizeLimit": job.shared_memory}
        volumes.append({"name": "shm", "emptyDir": memory})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    if job.read_only_root and all(mount.path.rstrip("/") != _TMP for mount in job.mounts):
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": _TMP})
    # A claim that is mounted twice is still one volume.
    claims = dict.fromkeys(mount.claim for mount in job.mounts)
    names = {claim: f"claim-{number}" for number, claim in enumerate(claims)}
    volumes += [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in names.items()
    ]
    for mount in job.mounts:
        own = {"subPath": mount.sub_path, "readOnly": mount.read_only or None}
        mounts.append(_without_empty({"name": names[mount.claim], "mountPath": mount.path, **own}))
    return volumes, mounts


def _without_empty(fields: Body) -> Body:
    """Leave out what was not asked for, so that the cluster's defaults apply. False and 0 stay."""
    return {key: value for key, value in fields.items() if value not in (None, "", [], {})}
