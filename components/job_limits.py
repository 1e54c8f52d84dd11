"""What the parameter `job` of a run may ask for, as the namespace's owner says in a ConfigMap.

A run's user writes `job`, and the pods that it describes are made by the account of the pipeline's steps,
which may do more than that user. The step reads the limits from variables, which it has from the ConfigMap
and not from the run. Without the ConfigMap, or one of its keys, nothing is limited.
"""

import os
from fnmatch import fnmatchcase

from components.launchers.spec import JobSpec

CONFIG_MAP = "kubedet-limits"
"""Name of the ConfigMap in the namespace of the runs; `deploy/base` holds one."""

VARIABLES = {
    "secrets": "KUBEDET_ALLOWED_SECRETS",
    "service-accounts": "KUBEDET_ALLOWED_SERVICE_ACCOUNTS",
    "capabilities": "KUBEDET_ALLOWED_CAPABILITIES",
}
"""Its keys, and the variables that the step has them in: names parted by spaces, or patterns (kubedet-*)."""


def problems(job: JobSpec) -> list[str]:
    """Return a line for each thing that a job asks for and may not have.

    Args:
        job: as it would be started.
    """
    rdma = ["IPC_LOCK"] if job.network.profile == "rdma" else []
    secrets = [*(item.secret for item in job.secret_env), *job.image_pull_secrets]
    asked_names = {
        "secrets": secrets,
        "service-accounts": [job.service_account] if job.service_account else [],
        "capabilities": [*job.capabilities, *rdma],
    }
    lines = []
    for key, names in asked_names.items():
        allowed = os.environ.get(VARIABLES[key])
        refused = [name for name in dict.fromkeys(names) if not _is_allowed(name, allowed)]
        if refused:
            lines.append(
                f"  {', '.join(refused)}: not among the {key} that the ConfigMap {CONFIG_MAP} allows here "
                f"({allowed or 'none'}); its namespace's owner may add to them"
            )
    return lines


def _is_allowed(name: str, allowed: str | None) -> bool:
    return allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed.split())
