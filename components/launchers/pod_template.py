"""Builds the pod template for one node of a job, the same for every kind of job."""

import math
from functools import cache
from typing import Any

from kubernetes.client import (
    ApiClient,
    V1Capabilities,
    V1Container,
    V1EmptyDirVolumeSource,
    V1EnvVar,
    V1EnvVarSource,
    V1LabelSelector,
    V1LocalObjectReference,
    V1ObjectMeta,
    V1PersistentVolumeClaimVolumeSource,
    V1PodSecurityContext,
    V1PodSpec,
    V1PodTemplateSpec,
    V1ResourceRequirements,
    V1SeccompProfile,
    V1SecretKeySelector,
    V1SecurityContext,
    V1Toleration,
    V1TopologySpreadConstraint,
    V1Volume,
    V1VolumeMount,
)

from components.launchers import kubernetes_names
from components.launchers.kubernetes_names import (
    LABEL_MANAGED,
    LABEL_NAME,
    LABEL_QUEUE,
    LABEL_SPEC,
    MANAGED_BY,
)
from components.launchers.process_variables import process_variables
from components.launchers.spec import JobSpec

Body = dict[str, Any]  # A Kubernetes object as parsed from YAML.


def pod_labels(job: JobSpec) -> dict[str, str]:
    """Return the labels of every pod of a job."""
    managed = {"app.kubernetes.io/name": "kubedet", LABEL_MANAGED: MANAGED_BY, LABEL_NAME: job.name}
    # Read by Istio (older versions read the annotation): a sidecar breaks the rendezvous.
    mesh = {"sidecar.istio.io/inject": "false"}
    return mesh | ({"runai/queue": job.runai_queue} if job.runai_queue else {}) | dict(job.labels) | managed


def job_metadata(job: JobSpec) -> V1ObjectMeta:
    """Return the metadata of the job itself."""
    queue = {LABEL_QUEUE: job.kueue_queue} if job.kueue_queue else {}
    pods = {key: value for key, value in pod_labels(job).items() if key != "sidecar.istio.io/inject"}
    labels = pods | queue | {LABEL_SPEC: job.fingerprint}
    return V1ObjectMeta(name=job.name, namespace=job.namespace or None, labels=labels)


def is_suspended(job: JobSpec) -> bool | None:
    """Whether to create a job suspended until it is resumed; None: not suspended."""
    return job.suspend or bool(job.kueue_queue) or None  # Kueue resumes jobs when it admits them.


RENDEZVOUS_PORT = 29400  # Port of torchrun's c10d rendezvous.


def rendezvous_variables(job: JobSpec, first: str) -> dict[str, str]:
    """Return torchrun's variables for a c10d rendezvous at the node with the host name `first`."""
    bounds = f"{job.elastic.min_nodes}:{job.elastic.max_nodes}" if job.elastic else str(job.nodes)
    return {
        "PET_NNODES": bounds,
        "PET_NPROC_PER_NODE": str(job.processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{RENDEZVOUS_PORT}",
        "PET_RDZV_ID": job.name,
        "PET_MAX_RESTARTS": str(job.elastic.max_restarts if job.elastic else 0),
    }


CONTAINER = "pytorch"  # The Training Operator requires this name.
# Annotation with the name of the training container; others may be added.
MAIN_CONTAINER_KEY = "kubectl.kubernetes.io/default-container"
_TMP = "/tmp"  # noqa: S108


def make_pod_template(
    job: JobSpec, *, container: str = CONTAINER, env: dict[str, str] | None = None, **pod: Any
) -> V1PodTemplateSpec:
    """Return the pod template of a job.

    `env` overrides the job's variables; `pod` are fields of V1PodSpec that depend on the kind of job.
    """
    volumes, mounts = _make_volumes(job)
    annotations = {"sidecar.istio.io/inject": "false", MAIN_CONTAINER_KEY: container, **job.annotations}
    spec = V1PodSpec(
        scheduler_name=job.scheduler or ("runai-scheduler" if job.runai_queue else None),
        priority_class_name=job.priority_class or None,
        service_account_name=job.service_account or None,
        # Training needs no access to the API, so the pod gets no token and no service variables.
        automount_service_account_token=False,
        enable_service_links=False,
        image_pull_secrets=[V1LocalObjectReference(name) for name in job.image_pull_secrets] or None,
        node_selector=dict(job.node_selector) or None,
        tolerations=[
            V1Toleration(
                key=item.key or None,
                operator=item.operator or None,
                value=item.value or None,
                effect=item.effect or None,
            )
            for item in job.tolerations
        ]
        or None,
        topology_spread_constraints=[
            V1TopologySpreadConstraint(
                max_skew=item.max_skew,
                topology_key=item.topology_key,
                when_unsatisfiable="DoNotSchedule" if item.required else "ScheduleAnyway",
                label_selector=V1LabelSelector(match_labels={LABEL_NAME: job.name}),
            )
            for item in job.spread
        ]
        or None,
        security_context=V1PodSecurityContext(
            run_as_user=job.run_as_user,
            run_as_group=job.run_as_group,
            fs_group=job.fs_group,
            # Do not change the group of millions of files at every start.
            fs_group_change_policy="OnRootMismatch" if job.fs_group is not None else None,
            seccomp_profile=V1SeccompProfile(type="RuntimeDefault"),
        ),
        termination_grace_period_seconds=math.ceil(job.grace_seconds),
        containers=[_make_container(job, container, env or {}, mounts)],
        volumes=volumes or None,
        **pod,
    )
    return V1PodTemplateSpec(
        metadata=V1ObjectMeta(annotations=annotations, labels=pod_labels(job)), spec=spec
    )


def _make_container(job: JobSpec, name: str, env: dict[str, str], mounts: list[V1VolumeMount]) -> V1Container:
    # By default torchrun kills 30 s after SIGTERM, regardless of the pod's grace period.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(math.ceil(job.grace_seconds) - 5, 1))}
    variables = [V1EnvVar(name, value) for name, value in (patience | process_variables(job) | env).items()]
    for item in job.secret_env:
        key = V1SecretKeySelector(name=item.secret, key=item.key, optional=item.optional or None)
        variables.append(V1EnvVar(item.name, value_from=V1EnvVarSource(secret_key_ref=key)))
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
        added.append("IPC_LOCK")  # Memory that is registered with the network card is locked.
    # An image that runs as root needs root's capabilities to read volumes of other users.
    dropped = ["ALL"] if job.run_as_non_root else []
    return V1Container(
        name=name,
        image=job.image or None,
        image_pull_policy=job.image_pull_policy or None,
        command=list(job.command),
        working_dir=job.working_dir or None,
        env=variables,
        resources=V1ResourceRequirements(limits=_drop_empty(limits), requests=_drop_empty(requests)),
        security_context=V1SecurityContext(
            run_as_non_root=job.run_as_non_root or None,
            allow_privilege_escalation=False,
            read_only_root_filesystem=job.read_only_root or None,
            capabilities=V1Capabilities(drop=dropped or None, add=added or None),
        ),
        volume_mounts=mounts or None,
    )


def _drop_empty(amounts: dict[str, str]) -> dict[str, str] | None:
    """Return the non-empty amounts; None if there are none, so that the cluster's defaults apply."""
    return {name: amount for name, amount in amounts.items() if amount} or None


def _make_volumes(job: JobSpec) -> tuple[list[V1Volume], list[V1VolumeMount]]:
    """Return the volumes of a pod and the mounts of its container: claims, /dev/shm and /tmp."""
    volumes: list[V1Volume] = []
    mounts: list[V1VolumeMount] = []
    if kubernetes_names.parse_quantity(job.shared_memory) > 0:
        memory = V1EmptyDirVolumeSource(medium="Memory", size_limit=job.shared_memory)
        volumes.append(V1Volume(name="shm", empty_dir=memory))
        mounts.append(V1VolumeMount(name="shm", mount_path="/dev/shm"))  # noqa: S108
    if job.read_only_root and all(mount.path.rstrip("/") != _TMP for mount in job.mounts):
        volumes.append(V1Volume(name="tmp", empty_dir=V1EmptyDirVolumeSource()))
        mounts.append(V1VolumeMount(name="tmp", mount_path=_TMP))
    # A claim that is mounted twice is still one volume.
    claims = dict.fromkeys(mount.claim for mount in job.mounts)
    names = {claim: f"claim-{number}" for number, claim in enumerate(claims)}
    for claim, name in names.items():
        source = V1PersistentVolumeClaimVolumeSource(claim_name=claim)
        volumes.append(V1Volume(name=name, persistent_volume_claim=source))
    for mount in job.mounts:
        mounts.append(
            V1VolumeMount(
                name=names[mount.claim],
                mount_path=mount.path,
                sub_path=mount.sub_path or None,
                read_only=mount.read_only or None,
            )
        )
    return volumes, mounts


@cache
def _serializer() -> ApiClient:
    return ApiClient()


def to_body(model: Any) -> Body:
    """Convert an object of the Kubernetes client's models to JSON fields, without those that are None."""
    body: Body = _serializer().sanitize_for_serialization(model)
    return body
