"""The specification of a training job; its fields' docstrings are the text of `kubedet job fields`."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from components.launchers import kubernetes_names
from trainer.base.errors import ConfigError
from trainer.config.types import Count, Int, Positive

_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

Name = Annotated[str, AfterValidator(kubernetes_names.check_job_name)]
DnsName = Annotated[str, AfterValidator(kubernetes_names.check_name)]
Quantity = Annotated[str, AfterValidator(kubernetes_names.check_quantity)]
Path = Annotated[str, AfterValidator(kubernetes_names.check_mount_path)]
EnvName = Annotated[str, AfterValidator(kubernetes_names.check_variable)]
Labels = Mapping[Annotated[str, AfterValidator(kubernetes_names.check_qualified_name)], str]
START_TIMEOUT = 1800  # Default of `JobSpec.start_timeout`, in seconds.
Nodes = Annotated[Positive, Field(le=4096)]


@dataclass(config=_STRICT, frozen=True)
class Mount:
    """A PersistentVolumeClaim in every pod."""

    claim: Annotated[str, AfterValidator(kubernetes_names.check_required_name)]
    """Name of the claim."""
    path: Path
    """Absolute path at which it is mounted."""
    read_only: bool = False
    """Mount it read-only."""
    sub_path: str = ""
    """Folder of the volume to mount; empty mounts all of it."""


@dataclass(config=_STRICT, frozen=True)
class SecretEnv:
    """An environment variable whose value comes from a Secret, never from the specification."""

    name: EnvName
    """The variable."""
    secret: Annotated[str, AfterValidator(kubernetes_names.check_required_name)]
    """Name of the Secret."""
    key: str
    """Key in the Secret."""
    optional: bool = False
    """Start without the variable if the Secret or key is missing."""


@dataclass(config=_STRICT, frozen=True)
class Toleration:
    """A toleration of the pods."""

    key: str = ""
    """Key of the taint; empty with Exists matches every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Operator that compares the value."""
    value: str = ""
    """Value of the taint, for Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty matches all."""


@dataclass(config=_STRICT, frozen=True)
class Spread:
    """How the pods are spread over parts of the cluster."""

    topology_key: str = "kubernetes.io/hostname"
    """Node label whose values define the topology domains."""
    max_skew: Positive = 1
    """Maximum difference in the number of pods between two domains."""
    required: bool = False
    """Leave a pod pending instead of violating the rule."""


@dataclass(config=_STRICT, frozen=True)
class Network:
    """How the processes communicate: settings of NCCL (and of gloo's interface)."""

    profile: Literal["default", "tcp", "rdma"] = "default"
    """default lets NCCL choose, tcp disables InfiniBand, rdma requires it."""
    interface: str = ""
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, e.g. net1 of a secondary network."""
    socket_threads: Count = 0
    """NCCL_SOCKET_NTHREADS for tcp; 0 lets NCCL choose."""
    sockets_per_thread: Count = 0
    """NCCL_NSOCKS_PERTHREAD for tcp; 0 lets NCCL choose."""
    hca: str = ""
    """NCCL_IB_HCA for rdma, e.g. mlx5."""
    gid_index: Annotated[Int, Field(ge=-1)] = -1
    """NCCL_IB_GID_INDEX for rdma (3 is usually RoCE v2 over IPv4); -1 lets NCCL choose."""
    debug: Literal["", "VERSION", "WARN", "INFO"] = "WARN"
    """NCCL_DEBUG; INFO logs the selected transport."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "Network":
        if self.profile != "rdma" and (self.hca or self.gid_index >= 0):
            raise ValueError("hca and gid_index require the profile rdma")
        if self.profile != "tcp" and (self.socket_threads or self.sockets_per_thread):
            raise ValueError("socket_threads and sockets_per_thread require the profile tcp")
        if self.socket_threads * self.sockets_per_thread > 64:
            raise ValueError("socket_threads x sockets_per_thread must be at most 64, NCCL's limit")
        return self


@dataclass(config=_STRICT, frozen=True)
class Elastic:
    """A job that continues with fewer nodes if it loses some."""

    min_nodes: Nodes = 1
    """Minimum number of nodes."""
    max_nodes: Nodes = 1
    """Maximum number of nodes."""
    max_restarts: Count = 10
    """Maximum number of restarts of the processes: each lost or regained node counts as one."""

    @model_validator(mode="after")
    def _check_order(self) -> "Elastic":
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}")
        return self


@dataclass(config=_STRICT, frozen=True)
class JobSpec:
    """What to run, with which resources, and how to handle failures."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments that every node runs (see `training`), without a shell."""
    working_dir: Annotated[str, AfterValidator(kubernetes_names.check_working_dir)] = ""
    """Absolute path of the program's working directory; if empty, the image's or the current one."""
    name: Name = "kubedet"
    """Name of the job: a DNS-1035 label of at most 50 characters."""
    namespace: DnsName = ""
    """Namespace; if empty, the launcher's namespace."""
    image: Annotated[str, AfterValidator(kubernetes_names.check_image)] = ""
    """Container image; only a launcher that starts containers needs it."""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    """When the image is pulled; if empty, the cluster decides."""
    image_pull_secrets: tuple[DnsName, ...] = ()
    """Secrets with the registry's credentials."""

    nodes: Nodes = 1
    """Number of training pods, each on its own node."""
    nproc: Count = 0
    """Processes on each node; 0 starts one per GPU, or one without GPUs."""
    gpus: Count = 0
    """GPUs per node."""
    gpu_resource: Annotated[str, AfterValidator(kubernetes_names.check_qualified_name)] = "nvidia.com/gpu"
    """Resource name of the GPUs in the cluster."""
    cpu_request: Quantity = ""
    """CPU request per node, e.g. "32" or "500m"; if empty, cpu_limit."""
    cpu_limit: Quantity = ""
    """CPU limit per node; empty means no limit."""
    memory_request: Quantity = ""
    """Memory request per node, e.g. "128Gi"; if empty, memory_limit."""
    memory_limit: Quantity = ""
    """Memory limit per node, including shared memory; empty means no limit."""
    resources: Mapping[Annotated[str, AfterValidator(kubernetes_names.check_qualified_name)], Positive] = (
        Field(default_factory=dict)
    )
    """Further resources per node, e.g. {"openshift.io/mlxrdma": 1}."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm; "0" keeps the container runtime's default of 64 MB."""
    mounts: tuple[Mount, ...] = ()
    """PersistentVolumeClaims."""

    env: Mapping[EnvName, str] = Field(default_factory=dict)
    """Environment variables; they override those of the network profile."""
    secret_env: tuple[SecretEnv, ...] = ()
    """Environment variables from Secrets."""
    annotations: Labels = Field(default_factory=dict)
    """Annotations of the pods, e.g. {"k8s.v1.cni.cncf.io/networks": "ns/net"}."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the job and its pods."""
    network: Network = Field(default_factory=Network)
    """NCCL's settings."""

    capabilities: tuple[str, ...] = ()
    """Linux capabilities to add; profile rdma adds IPC_LOCK."""
    run_as_user: Count | None = None
    """User ID of the processes; if None, the image's."""
    run_as_group: Count | None = None
    """Group ID of the processes; if None, the image's."""
    fs_group: Count | None = None
    """Group that owns the mounted volumes."""
    run_as_non_root: bool = True
    """Refuse an image that would run as root."""
    read_only_root: bool = False
    """Mount the root file system read-only: only volumes, /dev/shm and /tmp are writable. This is the
    default in a run whose training uses the image of the steps."""
    service_account: DnsName = ""
    """Service account of the pods; its token is not mounted."""

    node_selector: Labels = Field(default_factory=dict)
    """Required node labels."""
    tolerations: tuple[Toleration, ...] = ()
    """Pod tolerations."""
    spread: tuple[Spread, ...] = ()
    """How the pods are spread over the nodes."""
    priority_class: DnsName = ""
    """Priority class of the pods."""
    scheduler: DnsName = ""
    """Scheduler of the pods; if empty, the cluster's, or Run:ai's with a Run:ai queue."""
    kueue_queue: DnsName = ""
    """Kueue LocalQueue that admits the job."""
    runai_queue: DnsName = ""
    """Run:ai queue (project) of the job."""
    suspend: bool = False
    """Create the job suspended."""

    elastic: Elastic | None = None
    """Limits of an elastic job; None means a fixed number of nodes."""
    backoff: Count = 10
    """Maximum number of restarts of a pod that ended with exit code 128 or higher (killed, preempted, lost
    its peers); then the launcher deletes the job. Exit codes from 1 to 127 fail the job at once."""
    ttl: Count | None = 86400
    """Seconds after the end of the job until it is deleted; None keeps it."""
    start_timeout: Positive = START_TIMEOUT
    """Seconds within which all pods must start; otherwise the launcher deletes the job. It waits a
    tenth of that if only a user can remove the obstacle, such as a missing image or Secret."""
    deadline: Count = 0
    """Seconds after which the job is stopped; 0 means no limit."""
    launcher_timeout: Count = 240
    """Seconds without a heartbeat of the step that waits for the job, after which the training of a run saves
    its state and ends, which frees its GPUs; 0 means no limit."""
    grace_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a stopped job may take to save its checkpoint."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "JobSpec":
        parse_quantity = kubernetes_names.parse_quantity
        problems = []
        if self.elastic and not self.elastic.min_nodes <= self.nodes <= self.elastic.max_nodes:
            bounds = f"{self.elastic.min_nodes} to {self.elastic.max_nodes}"
            problems.append(f"nodes {self.nodes} is outside of elastic's {bounds}")
        for name in ("cpu", "memory"):
            request, limit = getattr(self, f"{name}_request"), getattr(self, f"{name}_limit")
            if request and limit and parse_quantity(request) > parse_quantity(limit):
                problems.append(f"{name}_request {request} is above {name}_limit {limit}")
        fields = {"cpu", "memory", self.gpu_resource} & set(self.resources)
        problems += [f"resources.{name} has a field of its own" for name in sorted(fields)]
        paths = Counter(mount.path for mount in self.mounts)
        paths["/dev/shm"] += parse_quantity(self.shared_memory) > 0  # noqa: S108 (a mount path)
        problems += [f"two mounts at {path}" for path, count in sorted(paths.items()) if count > 1]
        variables = Counter([*self.env, *(item.name for item in self.secret_env)])
        problems += [f"two values for {name}" for name, count in sorted(variables.items()) if count > 1]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.nproc or self.gpus or 1

    @property
    def fingerprint(self) -> str:
        """Hash of all fields, 16 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


_ADAPTER = TypeAdapter(JobSpec)
FIELDS: Mapping[str, FieldInfo] = vars(JobSpec)["__pydantic_fields__"]


def field_phrase(name: str) -> str:
    """Return the docstring of a field as a phrase, without capital letter and full stop."""
    text = " ".join((FIELDS[name].description or "").split()).removesuffix(".")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def training_command(
    arguments: tuple[str, ...] | list[str], options: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the command of a node that runs `python -m trainer ARGUMENTS`, with options of `launch`."""
    return ("python", "-m", "trainer", "launch", *options, "--", *arguments)


def with_heartbeat(job: JobSpec, uri: str) -> JobSpec:
    """Return a job of `training_command` that ends if the heartbeat at `uri` stops, unless its limit is 0."""
    if not job.launcher_timeout:
        return job
    options = ("--heartbeat", uri, "--heartbeat-timeout", str(job.launcher_timeout))
    return replace(job, command=training_command(job.command[len(training_command(())) :], options))


def build_spec(fields: Mapping[str, Any], *, where: str = "the job's specification") -> JobSpec:
    """Build a specification strictly from parsed JSON; `where` describes the source in errors."""
    try:
        return _ADAPTER.validate_json(json.dumps(fields))
    except (TypeError, ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(f"{where} is not JSON: {error}", fix="use strings, numbers and lists") from None
        lines = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"])
            if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                lines.append(f"  {field}: no such field")
            elif item["type"] in ("missing", "missing_argument"):
                lines.append(f"  {field}: is missing")
            elif item["type"] == "value_error":
                prefix = f"  {field}: " if field else "  "
                lines += [prefix + problem for problem in str(item["ctx"]["error"]).splitlines()]
            else:
                value = json.dumps(item["input"], default=str)
                lines.append(f"  {field}: {item['msg'].lower()}, not {value[:80]}")
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(lines),
            fix="correct these fields; `kubedet job fields` explains each",
        ) from None
