"""A job as Run:ai's command line, `runai training pytorch|standard submit` of v2.20 and later.

Source: NVIDIA Run:ai, CLI reference. One node is a standard training. Of several the first is
the master, which is started besides the workers, alike them.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from components.launchers import kubernetes_names
from components.launchers.render import process_environment
from components.launchers.spec import JobSpec, Toleration
from trainer.errors import ConfigError

_WITHOUT_OPTION = (
    "image_pull_secrets", "fs_group", "read_only_root", "service_account", "node_selector",
    "spread", "priority_class", "scheduler", "kueue_queue", "suspend", "start_timeout", "deadline",
)  # fmt: skip


def kind(job: JobSpec) -> str:
    """Return Run:ai's kind of training: standard on one node, pytorch on several.

    Raises:
        ConfigError: the job is elastic, which neither command line of Run:ai has words for.
    """
    if job.elastic:
        raise ConfigError(
            "Run:ai's command line knows no elastic jobs",
            fix="leave out elastic, or apply the target pytorchjob with runai_queue set",
        )
    return "pytorch" if job.nodes > 1 else "standard"


def command(job: JobSpec, labels: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return the words of the command line.

    Args:
        job: the job.
        labels: labels besides its own.

    Raises:
        ConfigError: the job is elastic, see `kind`.
    """
    words = ["runai", "training", kind(job), "submit", job.name]
    words += option("project", job.runai_queue)
    words += ["--image", job.image]
    words += option("image-pull-policy", job.image_pull_policy)
    words += option("working-dir", job.working_dir)
    words += ["--workers", str(job.nodes - 1)] if job.nodes > 1 else []
    words += _resources(job)
    for key, value in job.annotations.items():
        words += ["--annotation", f"{key}={value}"]
    for key, value in {**job.labels, **labels}.items():
        words += ["--label", f"{key}={value}"]
    words += _volumes(job)
    words += _security(job)
    words += _environment(job)
    words += _policies(job)
    return [*words, "--command", "--", *job.command]


def left_out(job: JobSpec) -> list[str]:
    """Return the fields that this job sets and the command line has no option for."""
    further = {
        "clean_pods": job.nodes == 1 and differs(job, "clean_pods"),
        "mounts' read_only and sub_path": any(mount.read_only or mount.sub_path for mount in job.mounts),
    }
    return without_option(job, _WITHOUT_OPTION, further)


def without_option(job: JobSpec, fields: Iterable[str], own: Mapping[str, bool]) -> list[str]:
    """Return what a job sets and a command line of Run:ai's does not take.

    Args:
        job: the job.
        fields: those for which it has no option at all.
        own: what else this command line may not take, and whether the job has it.
    """
    sized = differs(job, "shared_memory") and kubernetes_names.amount(job.shared_memory) > 0
    common = {
        "shared_memory's size": sized,
        "secret_env's optional": any(item.optional for item in job.secret_env),
    }
    unsupported = [name for name in fields if differs(job, name)]
    return unsupported + [name for name, has in {**own, **common}.items() if has]


def differs(job: JobSpec, field: str) -> bool:
    """Whether a job names a field otherwise than its default."""
    return bool(getattr(job, field) != getattr(JobSpec(command=job.command), field))


def option(name: str, value: str) -> list[str]:
    """Return an option with its value; nothing where it has none."""
    return [f"--{name}", value] if value else []


def _resources(job: JobSpec) -> list[str]:
    if job.gpu_resource == "nvidia.com/gpu":
        words = ["--gpu-devices-request", str(job.gpus)] if job.gpus else []
        extended = dict(job.resources)
    else:
        words = []
        extended = ({job.gpu_resource: job.gpus} if job.gpus else {}) | dict(job.resources)
    for name, number in extended.items():
        words += ["--extended-resource", f"{name}={number}"]
    words += option("cpu-core-request", cores(job.cpu_request or job.cpu_limit))
    words += option("cpu-core-limit", cores(job.cpu_limit))
    words += option("cpu-memory-request", job.memory_request or job.memory_limit)
    return words + option("cpu-memory-limit", job.memory_limit)


def cores(quantity: str) -> str:
    """Return an amount of CPU as the number that Run:ai's options take: 0.5 for 500m."""
    return f"{kubernetes_names.amount(quantity).normalize():f}" if quantity else ""


def _volumes(job: JobSpec) -> list[str]:
    words = ["--large-shm"] if kubernetes_names.amount(job.shared_memory) > 0 else []
    for mount in job.mounts:
        words += ["--existing-pvc", f"claimname={mount.claim},path={mount.path}"]
    return words


def _security(job: JobSpec) -> list[str]:
    words = []
    if job.run_as_user is not None:
        words += ["--run-as-uid", str(job.run_as_user)]
    if job.run_as_group is not None:
        words += ["--run-as-gid", str(job.run_as_group)]
    for name in capabilities(job):
        words += ["--capability", name]
    return words + (["--run-as-non-root"] if job.run_as_non_root else [])


def capabilities(job: JobSpec) -> list[str]:
    """Return the capabilities that are asked for, IPC_LOCK with RDMA."""
    rdma = job.network.profile == "rdma" and "IPC_LOCK" not in job.capabilities
    return [*job.capabilities, *(["IPC_LOCK"] if rdma else [])]


def environment(job: JobSpec) -> dict[str, str]:
    """Return the plain variables, with the number of processes, which Run:ai's operator need not know."""
    return {"PET_NPROC_PER_NODE": str(job.processes)} | process_environment.variables(job)


def toleration(item: Toleration) -> str:
    """Return a toleration as both command lines write it."""
    parts = {"operator": item.operator, "key": item.key, "value": item.value, "effect": item.effect}
    return ",".join(f"{key}={value}" for key, value in parts.items() if value)


def _environment(job: JobSpec) -> list[str]:
    words = []
    for name, value in environment(job).items():
        words += ["--environment-variable", f"{name}={value}"]
    for item in job.secret_env:
        words += ["--env-secret", f"{item.name}={item.secret},key={item.key}"]
    return words


def _policies(job: JobSpec) -> list[str]:
    # ExitCode is the operator's alone; OnFailure is what comes nearest to it here.
    restart = "Never" if job.restart_policy == "Never" else "OnFailure"
    words = ["--restart-policy", restart]
    words += ["--master-restart-policy", restart] if job.nodes > 1 else []
    words += ["--backoff-limit", str(job.backoff)]
    words += ["--clean-pod-policy", job.clean_pods] if job.nodes > 1 else []
    for item in job.tolerations:
        words += ["--toleration", toleration(item)]
    words += ["--termination-grace-period", f"{math.ceil(job.grace_seconds)}s"]
    if job.ttl:
        words += ["--auto-deletion-time-after-completion", f"{job.ttl}s"]
    return [*words, "--preemptibility", "preemptible"]
