"""Limits on the parameter `job` of a run, which the namespace's owner sets in a ConfigMap.

The service account of the steps creates the pods that `job` describes, and may do more than the run's author.
The train step gets the limits as variables from the ConfigMap, not from the run. Without the ConfigMap, or
one of its keys, nothing is limited except the Secrets that belong to steps.
"""

import json
import os
from fnmatch import fnmatchcase

from components import environment
from components.launchers.spec import JobSpec

CONFIG_MAP = "kubedet-limits"
"""Name of the ConfigMap in the namespace of the runs; `deploy/base` has one."""

VARIABLES = {
    "secrets": "KUBEDET_ALLOWED_SECRETS",
    "service-accounts": "KUBEDET_ALLOWED_SERVICE_ACCOUNTS",
    "capabilities": "KUBEDET_ALLOWED_CAPABILITIES",
    "annotations": "KUBEDET_ALLOWED_ANNOTATIONS",
    "networks": "KUBEDET_ALLOWED_NETWORKS",
}
"""Keys of the ConfigMap, and the variables of the step. Values are names separated by spaces; all but Secrets
may be patterns (`sriov/*`)."""

OF_STEPS = frozenset({environment.SIGNING, "kubedet-notify", "kubedet-openlineage"})
"""Secrets for steps of the pipeline. No job may have them, whatever the ConfigMap says."""

_ROOT_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""What container runtimes give a process of root (containerd, pkg/oci `defaultUnixCaps`)."""

_NETWORK_ANNOTATIONS = ("k8s.v1.cni.cncf.io/networks", "v1.multus-cni.io/default-network")


def problems(job: JobSpec) -> list[str]:
    """Return a line for each kind of request that a job makes and may not make."""
    rdma = ["IPC_LOCK"] if job.network.profile == "rdma" else []
    requested = {
        "secrets": [*(item.secret for item in job.secret_env), *job.image_pull_secrets],
        "service-accounts": [job.service_account] if job.service_account else [],
        # A container that may run as root keeps these: see `_container_security` of the renderer.
        "capabilities": [*job.capabilities, *rdma, *(() if job.run_as_non_root else _ROOT_CAPABILITIES)],
        "annotations": list(job.annotations),
        "networks": _foreign_networks(job),
    }
    if reserved := sorted(OF_STEPS.intersection(requested["secrets"])):
        return [f"  {', '.join(reserved)}: only steps of the pipeline may read this Secret"]
    lines = []
    for key, names in requested.items():
        allowed = os.environ.get(VARIABLES[key])
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


def _foreign_networks(job: JobSpec) -> list[str]:
    """Return the secondary networks of other namespaces in the annotations, as `namespace/network`.

    Source: the Network Plumbing Working Group's multi-network specification 1.3, section 4.1.
    """
    from components.launchers.cluster.client import own_namespace

    names: list[str] = []
    for annotation in _NETWORK_ANNOTATIONS:
        text = job.annotations.get(annotation, "")
        if not set(text) & set('[{"'):
            names += [name.strip().partition("@")[0] for name in text.split(",")]
            continue
        try:
            names += [f"{item.get('namespace') or ''}/{item['name']}" for item in json.loads(text)]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            names.append(f"unreadable/{text[:80]}")
    return [name for name in names if name.rpartition("/")[0] not in ("", own_namespace())]
