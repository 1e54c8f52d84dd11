"""Specifies, names and deletes the jobs of a run."""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from components import environment, launchers
from components.launchers.backend import Phase
from components.launchers.spec import JobSpec, build_spec, training_command
from trainer import storage
from trainer.base.errors import ConfigError

T = TypeVar("T")
logger = logging.getLogger(__name__)

STEPS = ("download", "shard", "train")  # Steps of a run that may start a job.

VOLUME = "/data"  # Mount path of the volume in the pods of a run, if they have one.

PARAMETERS = ("image", "nodes", "nproc", "gpus")
"""Fields of a job that are also parameters of the pipeline."""

_POD_FIELDS = ("gpus", "image")  # Those of PARAMETERS that only apply to jobs in pods.

_TOLERATION_FIELDS = ("key", "operator", "value", "effect")
_RUN_FIELDS = ("name", "namespace", "command")

CONFIG_MAP = "kubedet-limits"  # Name of the ConfigMap in the namespace of the runs; `deploy/base` has one.

LIMITS = {
    "secrets": "KUBEDET_ALLOWED_SECRETS",
    "service-accounts": "KUBEDET_ALLOWED_SERVICE_ACCOUNTS",
    "capabilities": "KUBEDET_ALLOWED_CAPABILITIES",
    "annotations": "KUBEDET_ALLOWED_ANNOTATIONS",
    "networks": "KUBEDET_ALLOWED_NETWORKS",
}
"""Keys of the ConfigMap, and the environment variables of the step that hold their values: names separated by
spaces. All except Secrets may be patterns (`sriov/*`)."""

STEP_SECRETS = frozenset({environment.SIGNING_NAME, "kubedet-notify"})
"""Secrets that only steps may read. The ConfigMap cannot allow them to a job."""

_ROOT_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""The capabilities that container runtimes give to root (containerd, pkg/oci `defaultUnixCaps`)."""

_NETWORK_ANNOTATIONS = ("k8s.v1.cni.cncf.io/networks", "v1.multus-cni.io/default-network")


@dataclass(frozen=True)
class Request:
    """What a run requests from the launcher. The fields are named like the pipeline's parameters."""

    launcher: str = "local"
    nodes: int = 1
    nproc: int = 0  # Processes on each node; 0: one for each GPU, or one without GPUs.
    gpus: int = 0  # GPUs of each node.
    image: str = ""  # Container image of the training; empty: the image of the steps.
    job: Mapping[str, Any] = field(default_factory=dict)  # Further fields of JobSpec, by name.
    credentials: str = environment.CREDENTIALS  # Secret with the object store's keys; it need not exist.
    claim: str = ""  # PersistentVolumeClaim that the run's pods mount at VOLUME; empty: none.
    run_id: str = ""  # Determines the job's name.
    step: str = "train"  # One of STEPS; it becomes part of the job's name.
    steps_image: str = ""  # Container image of the steps.

    def build_spec(self, arguments: tuple[str, ...]) -> JobSpec:
        """Describe the job that runs `python -m trainer ARGUMENTS`."""
        in_pods = launchers.in_pods(self.launcher)
        problems = [f"  job.{name}: is a parameter of the run" for name in PARAMETERS if name in self.job]
        problems += [f"  job.{name}: is decided by the run" for name in _RUN_FIELDS if name in self.job]
        env: dict[str, Any] = self._value("env", {})
        secrets = sorted(set(env) & set(environment.secret_variables().values()))
        problems += [f"  job.env.{name}: is secret: put it into a Secret (secret_env)" for name in secrets]
        fields = {name: value for name, value in self.job.items() if name not in (*PARAMETERS, *_RUN_FIELDS)}
        own = {name: getattr(self, name) for name in PARAMETERS}
        fields |= {name: value for name, value in own.items() if in_pods or name not in _POD_FIELDS}
        fields["command"] = training_command(arguments)
        if in_pods:
            image = self.image or self.steps_image
            # Only the steps' own image is known to work with a read-only root.
            fields = {"read_only_root": image == self.steps_image != ""} | fields
            fields |= {"image": image, "name": job_name(self.run_id, self.step)} | self._job_defaults()
        else:
            useless = [name for name in _POD_FIELDS if own[name]] + ["job"] * bool(self.job)
            problems += [f"  {name}: has no effect with the launcher {self.launcher}" for name in useless]
        try:
            spec = build_spec(fields, where="the training job")
            problems += _find_violations(spec) if in_pods else []
        except ConfigError as error:
            for line in map(str.strip, error.message.splitlines()[1:]):
                field = line.partition(":")[0].partition(".")[0]
                of_job = field in self.job and field not in PARAMETERS
                problems.append(f"  job.{line}" if of_job else f"  {line}")
        if problems:
            raise ConfigError(
                "the training job cannot be used:\n" + "\n".join(problems),
                fix="correct these; `kubedet job fields` explains each field of a job",
            )
        return spec

    def _job_defaults(self) -> dict[str, Any]:
        """Return the environment and volumes of the step's own pod; the job's settings override them."""
        env = environment.read_settings() | self._value("env", {})
        secret_env: list[Any] = list(self._value("secret_env", []))
        defined = {*env, *(item.get("name") for item in secret_env if isinstance(item, dict))}
        secret_env += [
            {"name": name, "secret": self.credentials, "key": key, "optional": True}
            for key, name in environment.secret_variables().items()
            if name not in defined
        ]
        mounts = [{"claim": self.claim, "path": VOLUME}] if self.claim else []
        values = {"env": env, "secret_env": secret_env, "mounts": mounts + self._value("mounts", [])}
        # A value of the wrong type stays as it is: `build_spec` reports it.
        return {
            name: value
            for name, value in values.items()
            if isinstance(self.job.get(name, value), type(value))
        }

    def _value(self, name: str, default: T) -> T:
        value = self.job.get(name)
        return value if isinstance(value, type(default)) else default


def _find_violations(job: JobSpec) -> list[str]:
    """Return one line for each kind of request that exceeds the limits.

    The service account of the steps creates the pods that `job` describes, and may do more than the run's
    author. The limits come from a ConfigMap of the namespace's owner, not from the run. Without it, or one of
    its keys, nothing is limited except STEP_SECRETS, which are always refused.
    """
    from components.launchers.cluster.client import own_namespace

    # Secondary networks as `namespace/network`; source: the Network Plumbing Working Group's multi-network
    # specification 1.3, section 4.1.
    networks: list[str] = []
    for text in filter(None, map(job.annotations.get, _NETWORK_ANNOTATIONS)):
        if not set(text) & set('[{"'):
            networks += [name.strip().partition("@")[0] for name in text.split(",")]
            continue
        try:
            networks += [f"{item.get('namespace') or ''}/{item['name']}" for item in json.loads(text)]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            networks.append(f"unreadable/{text[:80]}")
    rdma = ["IPC_LOCK"] if job.network.profile == "rdma" else []
    requested = {
        "secrets": [*(item.secret for item in job.secret_env), *job.image_pull_secrets],
        "service-accounts": [job.service_account] if job.service_account else [],
        # A container that may run as root keeps these: see `pod_template`.
        "capabilities": [*job.capabilities, *rdma, *(() if job.run_as_non_root else _ROOT_CAPABILITIES)],
        "annotations": list(job.annotations),
        "networks": [each for each in networks if each.rpartition("/")[0] not in ("", own_namespace())],
    }
    if reserved := sorted(STEP_SECRETS.intersection(requested["secrets"])):
        return [f"  {', '.join(reserved)}: only steps of the pipeline may read this Secret"]
    lines = []
    for key, names in requested.items():
        allowed = os.environ.get(LIMITS[key])
        if allowed is None:
            continue
        # Secrets have no patterns: one could match a Secret that is created later.
        matches = str.__eq__ if key == "secrets" else fnmatchcase
        patterns, unique = allowed.split(), dict.fromkeys(names)
        if refused := [name for name in unique if not any(matches(name, each) for each in patterns)]:
            root = key == "capabilities" and not job.run_as_non_root
            by_name = " by name, not by pattern" if key == "secrets" else ""
            lines.append(
                f"  {', '.join(refused)}: not among the {key} that the ConfigMap {CONFIG_MAP} allows here "
                f"({allowed or 'none'}){' (run_as_non_root: false needs them)' if root else ''}; the owner "
                f"of the namespace can add them{by_name}"
            )
    return lines


def add_placement(
    job: Mapping[str, Any], tolerations: list[dict[str, Any]] | None, node_selector: Mapping[str, str] | None
) -> dict[str, Any]:
    """Add a task's Kubernetes tolerations and node selector to a job's fields, which take precedence."""
    tolerated = [
        {name: value for name, value in item.items() if value is not None and name in _TOLERATION_FIELDS}
        for item in tolerations or []
    ]
    placement = {"tolerations": tolerated, "node_selector": dict(node_selector or {})}
    return {name: value for name, value in placement.items() if value} | dict(job)


def check_folders(job: JobSpec, **folders: str) -> None:
    """Raise ConfigError for folders on the disk of the step's pod, which other pods cannot access."""
    mounted = tuple(mount.path + "/" for mount in job.mounts)
    lost = [
        f"  {name}: {folder}"
        for name, folder in folders.items()
        if storage.is_local(folder) and not f"{storage.absolute(folder)}/".startswith(mounted)
    ]
    if lost:
        raise ConfigError(
            "the pods of the job cannot access these folders:\n" + "\n".join(lost),
            fix="use a bucket, or a path below the volume of the run (claim) or of the job (mounts)",
        )


def job_name(run_id: str, step: str = "train") -> str:
    """Return the name of the job of a run's step: the same for every attempt."""
    try:
        digits = uuid.UUID(run_id).hex
    except ValueError:
        digits = hashlib.sha256(run_id.encode()).hexdigest()
    return f"kubedet-{digits[:12]}-{step}"


def delete_unfinished(launcher: str, run_id: str) -> None:
    """Delete the unfinished jobs of a run that has ended."""
    for step in STEPS:
        name = job_name(run_id, step)
        phase = launchers.delete_unfinished(launcher, name).phase
        if phase is not Phase.GONE:
            ended, deleted = "the job %s is %s", "deleted the job %s, which was still %s"
            logger.info(ended if phase.final else deleted, name, phase)
