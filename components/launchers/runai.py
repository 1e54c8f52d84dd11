"""Training jobs as workloads of Run:ai, through its program `runai`.

Three commands submit a job: `runai training standard|pytorch submit` of version 2.20 and later,
`runai submit-dist pytorch` of 2.13 to 2.19, and `runai submit-pytorch` before. Any of them can be printed;
`RunaiBackend` runs the first. Sources: Run:ai's CLI reference, CLI v1 reference and API reference, Workloads.
"""

import json
import logging
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from components.launchers.backend import Backend, JobStatus, LogLine, Phase, PodStatus, Timings
from components.launchers.kubernetes_names import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY, parse_quantity
from components.launchers.process_variables import process_variables
from components.launchers.spec import JobSpec
from trainer.base.clock import CLOCK, Clock
from trainer.base.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_KINDS = ("pytorch", "standard")  # In the order of look-up.
_OLDER_COMMANDS = {
    "runai-submit-dist": ["runai", "submit-dist", "pytorch", "--name"],
    "runai-submit-pytorch": ["runai", "submit-pytorch", "--name"],
}
_IMPLICIT_FIELDS = ("name", "command", "namespace", "nproc", "gpu_resource", "network", "launcher_timeout")
"""Fields that need no option: they are part of the command, the project or the environment."""


def submit_command(job: JobSpec, target: str) -> list[str]:
    """Return the command line for submitting a job; `target` selects the version of `runai`."""
    if job.elastic:
        raise ConfigError(
            "Run:ai's command line does not support elastic jobs",
            fix="omit it, or use a PyTorchJob with runai_queue",
        )
    kind = "pytorch" if job.nodes > 1 else "standard"
    words = [*_OLDER_COMMANDS.get(target, ["runai", "training", kind, "submit"]), job.name]
    for _, option, values in _make_options(job, older=target in _OLDER_COMMANDS):
        for value in values:
            if value is True:
                words.append(f"--{option}")
            elif value not in ("", None):
                words += [f"--{option}", str(value)]
    return [*words, "--command", "--", *job.command]


def unsupported_fields(job: JobSpec, target: str) -> list[str]:
    """Return the fields of a job (set or default) that the command line of `target` cannot express."""
    older = target in _OLDER_COMMANDS
    # Defaults of the older commands: any user, and Kubernetes' grace period.
    usual = JobSpec(job.command, run_as_non_root=not older, grace_seconds=30.0 if older else 60.0)
    changed = [item.name for item in fields(JobSpec) if getattr(job, item.name) != getattr(usual, item.name)]
    supported = {*_IMPLICIT_FIELDS, *(field for field, _, _ in _make_options(job, older=older))}
    partly = {
        "mounts' read_only": not older and any(mount.read_only for mount in job.mounts),
        "mounts' sub_path": any(mount.sub_path for mount in job.mounts),
        "shared_memory's size": "shared_memory" in changed and parse_quantity(job.shared_memory) > 0,
        "secret_env's optional": any(item.optional for item in job.secret_env),
    }
    return [name for name in changed if name not in supported] + [name for name, has in partly.items() if has]


def _make_options(job: JobSpec, *, older: bool) -> list[tuple[str, str, list[Any]]]:
    """Return (field, option, values); "" and None are omitted, True is a flag without value."""
    resources, gpus = dict(job.resources), job.gpus
    if gpus and job.gpu_resource != "nvidia.com/gpu":
        resources, gpus = {job.gpu_resource: gpus} | resources, 0
    cpus = (job.cpu_request or job.cpu_limit, job.cpu_limit)
    cores = [cpu and f"{parse_quantity(cpu).normalize():f}" for cpu in cpus]
    env = {"PET_NPROC_PER_NODE": job.processes} | process_variables(job)
    rdma = job.network.profile == "rdma" and "IPC_LOCK" not in job.capabilities
    mount = "{0.claim}:{0.path}{1}" if older else "claimname={0.claim},path={0.path}"
    secret = "{0.name}=SECRET:{0.secret},{0.key}" if older else "{0.name}={0.secret},key={0.key}"
    tolerations = []
    for item in job.tolerations:
        parts = {"operator": item.operator, "key": item.key, "value": item.value, "effect": item.effect}
        tolerations.append(",".join(_format_pairs({key: value for key, value in parts.items() if value})))
    options: list[tuple[str, str, str, list[Any]]] = [
        ("runai_queue", "project", "project", [job.runai_queue]),
        ("image", "image", "image", [job.image]),
        ("image_pull_policy", "image-pull-policy", "image-pull-policy", [job.image_pull_policy]),
        ("working_dir", "working-dir", "working-dir", [job.working_dir]),
        ("nodes", "workers", "workers", [job.nodes - 1 if older or job.nodes > 1 else None]),
        ("gpus", "gpu-devices-request", "gpu", [gpus or None]),
        ("resources", "extended-resource", "extended-resource", _format_pairs(resources)),
        ("cpu_request", "cpu-core-request", "cpu", [cores[0]]),
        ("cpu_limit", "cpu-core-limit", "cpu-limit", [cores[1]]),
        ("memory_request", "cpu-memory-request", "memory", [job.memory_request or job.memory_limit]),
        ("memory_limit", "cpu-memory-limit", "memory-limit", [job.memory_limit]),
        ("annotations", "annotation", "annotation", _format_pairs(job.annotations)),
        ("labels", "label", "label", _format_pairs(job.labels)),
        ("shared_memory", "large-shm", "large-shm", [parse_quantity(job.shared_memory) > 0 or None]),
        ("mounts", "existing-pvc", "pvc", [mount.format(m, ":ro" * m.read_only) for m in job.mounts]),
        ("run_as_user", "run-as-uid", "", [job.run_as_user]),
        ("run_as_group", "run-as-gid", "", [job.run_as_group]),
        ("capabilities", "capability", "add-capability", [*job.capabilities, "IPC_LOCK" if rdma else None]),
        ("run_as_non_root", "run-as-non-root", "", [job.run_as_non_root or None]),
        ("env", "environment-variable", "environment", _format_pairs(env)),
        ("secret_env", "env-secret", "environment", [secret.format(item) for item in job.secret_env]),
        # The closest equivalent of the Training Operator's ExitCode.
        ("", "restart-policy", "", ["OnFailure"]),
        ("", "master-restart-policy", "", ["OnFailure" if job.nodes > 1 else None]),
        ("backoff", "backoff-limit", "backoff-limit", [job.backoff]),
        ("tolerations", "toleration", "toleration", tolerations),
        ("grace_seconds", "termination-grace-period", "", [f"{math.ceil(job.grace_seconds)}s"]),
        ("ttl", "auto-deletion-time-after-completion", "ttl-after-finish", [job.ttl and f"{job.ttl}s"]),
        ("", "preemptibility", "", ["preemptible"]),
    ]
    chosen = [(field, old if older else new, values) for field, new, old, values in options]
    return [item for item in chosen if item[1]]


def _format_pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


_VERSION = "install Run:ai's command line v2.20 or later"
_ERROR_FIXES = {  # Patterns of error messages that the user must act on, and the fixes.
    r"unknown (?:command|flag|shorthand flag)": f"{_VERSION}; for an older one, print the command: kubedet "
    "job render --target runai-submit-dist (or runai-submit-pytorch)",
    r"logged in|\blog ?in\b|(?:token|session)[^.\n]*(?:expired|invalid|missing)|unauthenticated|"
    r"unauthori[sz]ed|\b401\b": "log in with `runai login` (in a program: `runai login application`)",
    r"project[^.\n]*(?:not found|required|missing|not set|not exist)": "see `runai project list`",
}
_NOT_FOUND = re.compile(r"(?:workload|training|job)s? .*(?:not[ _-]?found|not exist)|\b404\b", re.I)


class _WorkloadNotFoundError(LaunchError):
    """Run:ai has no workload of that name, kind and project."""


_PHASES = {  # Phases by Run:ai's names; any other is pending.
    "stopped": Phase.SUSPENDED, "stopping": Phase.SUSPENDED, "preempted": Phase.SUSPENDED,
    "running": Phase.RUNNING, "degraded": Phase.RUNNING, "restarting": Phase.RESTARTING,
    "terminating": Phase.RESTARTING, "error": Phase.RESTARTING, "crashloopbackoff": Phase.RESTARTING,
    "succeeded": Phase.SUCCEEDED, "completed": Phase.SUCCEEDED, "failed": Phase.FAILED,
}  # fmt: skip
_POD_PHASES = {
    "running": "Running", "succeeded": "Succeeded", "completed": "Succeeded", "failed": "Failed",
    "error": "Failed", "oomkilled": "Failed", "evicted": "Failed",
}  # fmt: skip


def _parse_status(values: Mapping[str, Any], name: str) -> JobStatus:
    """Return the status of a workload from the output of `describe`."""
    word = str(values.get("phase") or values.get("status") or "")
    requested = values.get("requestedpods", 1)
    phase = _PHASES.get(word.lower(), Phase.PENDING)
    pods = []
    for pod in map(_flatten, values.get("pods") or []):
        pod_name, pod_word = str(pod.get("name")), str(pod.get("status") or pod.get("phase") or "")
        pod_phase = _POD_PHASES.get(pod_word.lower(), "Pending")
        role = re.search(r"-(master|worker)-(\d+)$", pod_name)
        code = pod.get("exitcode")
        pods.append(
            PodStatus(
                pod_name,
                pod_phase,
                int(role[2]) + (role[1] == "worker") if role else 0,
                uid=pod_name,
                reason="" if pod_word.lower() in (pod_phase.lower(), "completed") else pod_word,
                message=str(pod.get("message") or ""),
                exit_code=None if code in (None, "") else int(code),
                restarts=int(pod.get("restarts") or 0),
                node=str(pod.get("node") or ""),
            )
        )
    return JobStatus(
        name,
        phase,
        reason="" if word.lower() in (phase, "completed") else word,
        message=str(values.get("phasemessage") or values.get("message") or ""),
        created=str(values.get("createdat") or ""),
        pods=tuple(sorted(pods, key=lambda pod: pod.rank)),
        nodes=int(requested["number"] if isinstance(requested, dict) else requested),
    )


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of all sections of a response by their lower-case names."""
    sections = [value for value in tree.values() if isinstance(value, dict)]
    return {key.lower(): value for part in [*sections, tree] for key, value in part.items()}


_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ")


class RunaiBackend(Backend):
    """Runs jobs in a project of Run:ai (default: the job's runai_queue, or `runai project set`)."""

    def __init__(self, project: str = "", timings: Timings | None = None, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.project, self.timings = project, timings or Timings(poll=5.0)
        self._kinds: dict[str, str] = {}

    @property
    def place(self) -> str:
        return f"Run:ai's project {self.project or 'of this user'}"

    @property
    def options(self) -> str:
        return " --backend runai" + (f" --project {self.project}" if self.project else "")

    def submit(self, job: JobSpec) -> str:
        if job.namespace:
            raise ConfigError(
                "Run:ai does not accept --namespace: each project has its own", fix="use --project instead"
            )
        self.project = job.runai_queue or self.project
        job = replace(job, runai_queue=self.project)
        labels = {**job.labels, LABEL_MANAGED: MANAGED_BY, LABEL_SPEC: job.fingerprint}
        words = submit_command(replace(job, labels=labels, runai_queue=""), "runai")
        status, existing = self._find(job.name)
        if status.phase is not Phase.GONE:
            _check_managed(job.name, existing or {})
            if existing and existing.get(LABEL_SPEC) == job.fingerprint and status.phase is not Phase.FAILED:
                logger.info("the workload %s exists: adopting it", job.name)
                return ""
            logger.info("the workload %s failed or has another specification: deleting it", job.name)
            self.stop(job.name)
        if ignored := unsupported_fields(job, "runai"):
            logger.warning("Run:ai's command line has no option for: %s", ", ".join(ignored))
        self._call(*words[1:], seconds=self.timings.submit)
        self._kinds[job.name] = words[2]
        return ""

    def status(self, name: str) -> JobStatus:
        return self._find(name)[0]

    def list_as_text(self) -> str:
        """Return the list of the project's training workloads as printed by Run:ai."""
        return self._call("training", "list")

    def follow(
        self, name: str, *, once: bool = False, rank: int | None = None
    ) -> Iterator[LogLine | JobStatus]:
        """See `Backend.follow`; with `rank` only the lines of that pod are read."""
        read: dict[str, tuple[str, str]] = {}  # The time of the last line of each pod: seconds and fraction.
        answered, final, began = self.clock.monotonic(), False, self.clock.now().isoformat()
        while True:
            try:
                status = self.status(name)
                answered, final = self.clock.monotonic(), status.phase.final
                yield replace(status, created=status.created or began)
                for pod in status.pods:
                    if pod.rank == rank or (rank is None and (pod.rank == 0 or pod.phase == "Failed")):
                        yield from self._new_lines(name, pod.name, read)
            except LaunchError as error:  # The connection broke, or the pod is not running.
                if once or self.clock.monotonic() - answered > self.timings.outage:
                    raise
                if final:
                    logger.warning("%s", error.message)
            if once or final:
                return
            self.clock.sleep(self.timings.poll)

    def _new_lines(self, name: str, pod: str, read: dict[str, tuple[str, str]]) -> Iterator[LogLine]:
        """Yield the lines of a pod that are newer than the time in `read`, and update it."""
        last = since = read.get(pod, ("", ""))
        resumed = ["--since-time", since[0]] if since[0] else []
        text = self._call(*self._job_args(name, "logs"), "--pod", pod, "--timestamps", *resumed)
        for line in text.splitlines():
            stamp = _TIMESTAMP.match(line)
            printed = (stamp[1] + stamp[3], (stamp[2] or "").ljust(9, "0")) if stamp else last
            if printed > since:
                last = read[pod] = max(last, printed)
                yield LogLine(pod, line[stamp.end() :] if stamp else line)

    def pod_lines(self, name: str, pod: PodStatus, *, follow: bool, tail: int = 0) -> Iterator[str]:
        events = self.follow(name, once=not follow, rank=pod.rank)
        return (event.text for event in events if isinstance(event, LogLine))

    def execute(self, name: str, pod: PodStatus, arguments: list[str]) -> int:
        terminal = ["--stdin", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        words = self._command(*self._job_args(name, "exec"), "--pod", pod.name, *terminal, "--", *arguments)
        return subprocess.run(words, check=False).returncode

    def stop(self, name: str, *, wait: bool = True) -> None:
        status, labels = self._find(name)
        if status.phase is Phase.GONE:
            return
        _check_managed(name, labels)
        with suppress(_WorkloadNotFoundError):
            self._call(*self._job_args(name, "delete"))
        end = self.clock.monotonic() + self.timings.removal
        while wait and self.status(name).phase is not Phase.GONE:
            if self.clock.monotonic() > end:
                raise LaunchError(
                    f"the workload {name} was deleted, and still exists after {self.timings.removal:g} s",
                    fix="check its state: runai training list",
                )
            self.clock.sleep(self.timings.poll)

    def _find(self, name: str) -> tuple[JobStatus, Mapping[str, str] | None]:
        """Return a job's status, GONE if there is none, and its labels; None if Run:ai does not show them."""
        for kind in sorted(_KINDS, key=lambda kind: kind != self._kinds.get(name)):
            try:
                text = self._call("training", kind, "describe", name, "--output", "json", "--pod-limit=-1")
                values = _flatten(json.loads(text))
                status = _parse_status(values, name)
            except _WorkloadNotFoundError:
                continue
            except (ValueError, LookupError, TypeError, AttributeError):
                raise LaunchError(
                    f"cannot read runai's output on workload {name}:\n{text[:400]}", fix=_VERSION
                ) from None
            self._kinds[name] = kind
            labels = values.get("labels")
            return status, labels if isinstance(labels, dict) else None
        return JobStatus(name, Phase.GONE), None

    def _job_args(self, name: str, verb: str) -> tuple[str, ...]:
        return ("training", self._kinds.get(name, _KINDS[0]), verb, name)

    def _call(self, *words: str, seconds: float = 120.0) -> str:
        """Run the program without a shell and return its output."""
        try:
            result = subprocess.run(
                self._command(*words),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"`runai {' '.join(words[:4])}` does not answer within {seconds:g} s",
                fix="check whether Run:ai's control plane is reachable (`runai whoami`), then try again",
            ) from None
        if not result.returncode:
            return result.stdout
        output = result.stderr.strip() or result.stdout
        lines = "\n".join(output.strip().splitlines()[-10:]) or f"exit code {result.returncode}"
        text = f"`runai {' '.join(words[:4])}` failed: {lines}"  # Option values may be secret.
        if _NOT_FOUND.search(output):
            raise _WorkloadNotFoundError(text, fix="see `kubedet job list --backend runai`")
        for pattern, fix in _ERROR_FIXES.items():
            if re.search(pattern, output, re.I):
                raise ConfigError(text, fix=fix)
        raise LaunchError(text, fix="follow the message; `runai training list` shows the workloads")

    def _command(self, *words: str) -> list[str]:
        """Return a command line with the project inserted after `training KIND VERB NAME`."""
        path = shutil.which("runai")
        if path is None:
            raise ConfigError(
                "the program runai is not on the PATH", fix="install runai from Run:ai's Help menu"
            )
        project = ["--project", self.project] if self.project else []
        return [path, *words[:4], *project, *words[4:]]


def _check_managed(name: str, labels: Mapping[str, str] | None) -> None:
    if labels is not None and labels.get(LABEL_MANAGED) != MANAGED_BY:
        raise LaunchError(
            f"the workload {name} was not created by kubedet",
            fix="choose another name, or delete it with runai",
        )
