"""A job as the older command line of Run:ai, `runai submit-dist pytorch` of v2.10 to v2.19 (CLI v1).

Source: Run:ai, CLI v1 reference, `runai submit-dist pytorch`, and "Secrets in Workloads". The
master is started besides the workers, alike them: one node is no worker at all.
"""

from components.launchers import kubernetes_names
from components.launchers.render import runai
from components.launchers.spec import JobSpec

_WITHOUT_OPTION = (
    "image_pull_secrets", "run_as_user", "run_as_group", "fs_group", "read_only_root", "service_account",
    "node_selector",
    "spread", "priority_class", "scheduler", "kueue_queue", "suspend", "start_timeout", "deadline",
)  # fmt: skip
_GRACE_SECONDS = 30  # Kubernetes' own, which this command line cannot change.


def command(job: JobSpec) -> list[str]:
    """Return the words of the command line.

    Raises:
        ConfigError: the job is elastic: such a job has no master, which this command line always makes.
    """
    runai.kind(job)
    words = ["runai", "submit-dist", "pytorch", "--name", job.name]
    words += runai.option("project", job.runai_queue)
    words += ["--image", job.image]
    words += runai.option("image-pull-policy", job.image_pull_policy)
    words += runai.option("working-dir", job.working_dir)
    words += ["--workers", str(job.nodes - 1)]
    words += _resources(job)
    for key, value in job.annotations.items():
        words += ["--annotation", f"{key}={value}"]
    for key, value in job.labels.items():
        words += ["--label", f"{key}={value}"]
    words += ["--large-shm"] if kubernetes_names.amount(job.shared_memory) > 0 else []
    for mount in job.mounts:
        words += ["--pvc", f"{mount.claim}:{mount.path}" + (":ro" if mount.read_only else "")]
    for name in runai.capabilities(job):
        words += ["--add-capability", name]
    for name, value in runai.environment(job).items():
        words += ["--environment", f"{name}={value}"]
    for item in job.secret_env:
        words += ["--environment", f"{item.name}=SECRET:{item.secret},{item.key}"]
    words += ["--backoff-limit", str(job.backoff), "--clean-pod-policy", job.clean_pods]
    for taint in job.tolerations:
        words += ["--toleration", runai.toleration(taint)]
    words += ["--ttl-after-finish", f"{job.ttl}s"] if job.ttl else []
    return [*words, "--command", "--", *job.command]


def left_out(job: JobSpec) -> list[str]:
    """Return the fields that this job sets, or has by default, and the command line has no option for."""
    further = {
        "run_as_non_root": job.run_as_non_root,
        f"grace_seconds above {_GRACE_SECONDS}": job.grace_seconds > _GRACE_SECONDS,
        "restart_policy": runai.differs(job, "restart_policy"),
        "mounts' sub_path": any(mount.sub_path for mount in job.mounts),
    }
    return runai.without_option(job, _WITHOUT_OPTION, further)


def _resources(job: JobSpec) -> list[str]:
    nvidia = job.gpu_resource == "nvidia.com/gpu"
    words = ["--gpu", str(job.gpus)] if job.gpus and nvidia else []
    others = {} if nvidia or not job.gpus else {job.gpu_resource: job.gpus}
    for name, number in (others | dict(job.resources)).items():
        words += ["--extended-resource", f"{name}={number}"]
    words += runai.option("cpu", runai.cores(job.cpu_request or job.cpu_limit))
    words += runai.option("cpu-limit", runai.cores(job.cpu_limit))
    words += runai.option("memory", job.memory_request or job.memory_limit)
    return words + runai.option("memory-limit", job.memory_limit)
