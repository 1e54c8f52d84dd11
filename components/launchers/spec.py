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

Name = Annotated[str, AfterValidator(kubernetes_names.job)]
DnsName = Annotated[str, AfterValidator(kubernetes_names.dns)]
Quantity = Annotated[str, AfterValidator(kubernetes_names.quantity)]
Path = Annotated[str, AfterValidator(kubernetes_names.mount_path)]
EnvName = Annotated[str, AfterValidator(kubernetes_names.environment)]
Labels = Mapping[Annotated[str, AfterValidator(kubernetes_names.qualified)], str]
Nodes = Annotated[Positive, Field(le=4096)]


@dataclass(config=_STRICT, frozen=True)
class Mount:
    """A PersistentVolumeClaim in every pod."""

    claim: Annotated[str, AfterValidator(kubernetes_names.dns_required)]
    """Name of the claim."""
    path: Path
    """Where it is mounted, an absolute path."""
    read_only: bool = False
    """Mount it read-only."""
    sub_path: str = ""
    """Folder of the volume that is mounted; empty is all of it."""


@dataclass(config=_STRICT, frozen=True)
class SecretEnv:
    """An environment variable whose value comes from a Secret, never from the specification."""

    name: EnvName
    """The variable."""
    secret: Annotated[str, AfterValidator(kubernetes_names.dns_required)]
    """Name of the Secret."""
    key: str
    """Key in the Secret."""
    optional: bool = False
    """Start without the variable where the Secret or key is missing."""


@dataclass(config=_STRICT, frozen=True)
class Toleration:
    """A toleration of the pods."""

    key: str = ""
    """Key of the taint; empty with Exists is every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """How the value is compared."""
    value: str = ""
    """Value of the taint, for Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty is all."""


@dataclass(config=_STRICT, frozen=True)
class Spread:
    """How the pods are spread over parts of the cluster."""

    topology_key: str = "kubernetes.io/hostname"
    """Node label whose values are the parts."""
    max_skew: Positive = 1
    """Largest difference of pods between two parts."""
    required: bool = False
    """Leave a pod pending rather than break the rule."""


@dataclass(config=_STRICT, frozen=True)
class Network:
    """How the processes talk: settings of NCCL (and of gloo's interface)."""

    profile: Literal["default", "tcp", "rdma"] = "default"
    """default leaves NCCL its choice, tcp forbids InfiniBand, rdma asks for it."""
    interface: str = ""
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, e.g. net1 of a secondary network."""
    socket_threads: Count = 0
    """NCCL_SOCKET_NTHREADS for tcp; 0 leaves it to NCCL."""
    sockets_per_thread: Count = 0
    """NCCL_NSOCKS_PERTHREAD for tcp; 0 leaves it to NCCL."""
    hca: str = ""
    """NCCL_IB_HCA for rdma, e.g. mlx5."""
    gid_index: Annotated[Int, Field(ge=-1)] = -1
    """NCCL_IB_GID_INDEX for rdma (3 is mostly RoCE v2 over IPv4); -1 leaves it to NCCL."""
    debug: Literal["", "VERSION", "WARN", "INFO"] = "WARN"
    """NCCL_DEBUG; INFO tells which transport was chosen."""

    @model_validator(mode="after")
    def _consistent(self) -> "Network":
        if self.profile != "rdma" and (self.hca or self.gid_index >= 0):
            raise ValueError("hca and gid_index belong to profile rdma")
        if self.profile != "tcp" and (self.socket_threads or self.sockets_per_thread):
            raise ValueError("socket_threads and sockets_per_thread belong to profile tcp")
        if self.socket_threads * self.sockets_per_thread > 64:
            raise ValueError("NCCL allows 64 sockets: socket_threads x sockets_per_thread is more")
        return self


@dataclass(config=_STRICT, frozen=True)
class Elastic:
    """A job that goes on with fewer nodes when it loses some."""

    min_nodes: Nodes = 1
    """Fewest nodes to train on."""
    max_nodes: Nodes = 1
    """Most nodes to train on."""
    max_restarts: Count = 10
    """How often the processes may be restarted: each lost or regained node costs one."""

    @model_validator(mode="after")
    def _ordered(self) -> "Elastic":
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is above max_nodes {self.max_nodes}")
        return self


@dataclass(config=_STRICT, frozen=True)
class JobSpec:
    """What to run, on how many processes, with what, and what to do when it goes wrong."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """Program and arguments that every node runs (see `training`); no shell is between."""
    working_dir: Annotated[str, AfterValidator(kubernetes_names.working_dir)] = ""
    """Folder in which the program starts, an absolute path; empty is the image's, or the present one."""
    name: Name = "kubedet"
    """Name of the job: a DNS-1035 label of at most 50 characters."""
    namespace: DnsName = ""
    """Namespace; empty is the launcher's own."""
    image: Annotated[str, AfterValidator(kubernetes_names.image)] = ""
    """Container image; only a launcher that starts containers needs it."""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    """When the image is pulled; empty is the cluster's rule."""
    image_pull_secrets: tuple[DnsName, ...] = ()
    """Secrets with the registry's credentials."""

    nodes: Nodes = 1
    """Machines that train, each a pod."""
    nproc: Count = 0
    """Processes on each node; 0 is one for each GPU, or one."""
    gpus: Count = 0
    """GPUs of each node."""
    gpu_resource: Annotated[str, AfterValidator(kubernetes_names.qualified)] = "nvidia.com/gpu"
    """Resource name of the GPUs in the cluster."""
    cpu_request: Quantity = ""
    """CPU of each node that is set aside, e.g. "32" or "500m"; empty is cpu_limit."""
    cpu_limit: Quantity = ""
    """Most CPU of each node; empty is no limit."""
    memory_request: Quantity = ""
    """Memory of each node that is set aside, e.g. "128Gi"; empty is memory_limit."""
    memory_limit: Quantity = ""
    """Most memory of each node, shared memory included; empty is no limit."""
    resources: Mapping[Annotated[str, AfterValidator(kubernetes_names.qualified)], Positive] = Field(
        default_factory=dict
    )
    """Further resources of each node, e.g. {"openshift.io/mlxrdma": 1}."""
    shared_memory: Quantity = "8Gi"
    """Size of /dev/shm; "0" leaves the container runtime's 64 MB."""
    mounts: tuple[Mount, ...] = ()
    """PersistentVolumeClaims."""

    env: Mapping[EnvName, str] = Field(default_factory=dict)
    """Environment variables; they win over the network profile's."""
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
    """User id of the processes; None is the image's."""
    run_as_group: Count | None = None
    """Group id of the processes; None is the image's."""
    fs_group: Count | None = None
    """Group that owns the mounted volumes."""
    run_as_non_root: bool = True
    """Refuse an image that would run as root."""
    read_only_root: bool = False
    """Only volumes, /dev/shm and /tmp (a volume) can be written. In a run whose training uses the image of
    the steps this is the default."""
    service_account: DnsName = ""
    """Service account of the pods; they get no token of it."""

    node_selector: Labels = Field(default_factory=dict)
    """Node labels that are asked for."""
    tolerations: tuple[Toleration, ...] = ()
    """Pod tolerations."""
    spread: tuple[Spread, ...] = ()
    """How the pods are spread."""
    priority_class: DnsName = ""
    """Priority class of the pods."""
    scheduler: DnsName = ""
    """Scheduler of the pods; empty is the cluster's, or Run:ai's with a Run:ai queue."""
    kueue_queue: DnsName = ""
    """Kueue LocalQueue that admits the job."""
    runai_queue: DnsName = ""
    """Run:ai queue (project) of the job."""
    suspend: bool = False
    """Create the job suspended."""

    elastic: Elastic | None = None
    """Bounds of an elastic job; None is a fixed number of nodes."""
    restart_policy: Literal["ExitCode", "OnFailure", "Never"] = "ExitCode"
    """ExitCode recreates a pod that ended with 128 or more (killed, preempted, lost its
    peers); 1 to 127 fail the job."""
    backoff: Count = 10
    """How often pods may be restarted before the job is given up."""
    clean_pods: Literal["Running", "All", "None"] = "Running"
    """Which pods are deleted when the job has ended."""
    ttl: Count | None = 86400
    """Seconds after its end when the job is deleted; None keeps it."""
    start_timeout: Positive = 1800
    """Seconds until all pods must run, or the job is given up."""
    deadline: Count = 0
    """Seconds after which the job is stopped; 0 is no limit."""
    launcher_timeout: Count = 240
    """Seconds without a sign of life from the step that waits for the job, after which the training of a run
    saves its state and ends, which frees its GPUs; 0 is no limit."""
    grace_seconds: float = Field(default=60.0, ge=0)
    """How long a job that was asked to stop may take to save its checkpoint, in seconds."""

    @model_validator(mode="after")
    def _consistent(self) -> "JobSpec":
        amount = kubernetes_names.amount
        problems = []
        if self.elastic and not self.elastic.min_nodes <= self.nodes <= self.elastic.max_nodes:
            bounds = f"{self.elastic.min_nodes} to {self.elastic.max_nodes}"
            problems.append(f"nodes {self.nodes} is outside of elastic's {bounds}")
        for name in ("cpu", "memory"):
            request, limit = getattr(self, f"{name}_request"), getattr(self, f"{name}_limit")
            if request and limit and amount(request) > amount(limit):
                problems.append(f"{name}_request {request} is above {name}_limit {limit}")
        fields = {"cpu", "memory", self.gpu_resource} & set(self.resources)
        problems += [f"resources.{name} is a field itself" for name in sorted(fields)]
        paths = Counter(mount.path for mount in self.mounts)
        paths["/dev/shm"] += amount(self.shared_memory) > 0  # noqa: S108 (the place, not a temporary file)
        problems += [f"two mounts at {path}" for path, count in sorted(paths.items()) if count > 1]
        variables = Counter([*self.env, *(item.name for item in self.secret_env)])
        problems += [f"two values of {name}" for name, count in sorted(variables.items()) if count > 1]
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


def meaning(name: str) -> str:
    """Return what a field means as a phrase: without capital and full stop."""
    text = " ".join((FIELDS[name].description or "").split()).removesuffix(".")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def training(arguments: tuple[str, ...] | list[str], options: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command of a node that runs `python -m trainer ARGUMENTS`, with options of `launch`."""
    return ("python", "-m", "trainer", "launch", *options, "--", *arguments)


def with_heartbeat(job: JobSpec, uri: str) -> JobSpec:
    """Return a job (of `training`) that ends if the heartbeat at `uri` stops, if it has a limit for that."""
    if not job.launcher_timeout:
        return job
    options = ["--heartbeat", uri, "--heartbeat-timeout", str(job.launcher_timeout)]
    if job.restart_policy == "OnFailure":  # Any other code would restart the container, which keeps its GPUs.
        options += ["--heartbeat-exit", "0"]
    return replace(job, command=training(job.command[len(training(())) :], tuple(options)))


def from_fields(fields: Mapping[str, Any], *, where: str = "the job's specification") -> JobSpec:
    """Build a specification strictly from fields as in JSON; `where` is their name in the error."""
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
            fix="correct these fields; `kubedet job fields` says what each means",
        ) from None
