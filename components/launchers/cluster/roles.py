"""The Roles of deploy/, and the remedy for a missing permission."""

import json
from collections.abc import Iterable

_TRAINER, _KUEUE = "trainer.kubeflow.org", "kueue.x-k8s.io"
ROLES = {
    "base": {
        ("kubeflow.org", "pytorchjobs"): "create get list delete",
        (_TRAINER, "trainjobs"): "create get list delete",
        (_TRAINER, "trainingruntimes"): "create get patch delete",
        ("", "pods"): "get list watch",
        ("", "pods/log"): "get",
        ("", "events"): "list",
        ("argoproj.io", "workflows"): "get watch",
        (_KUEUE, "workloads"): "list",
    },
    "operators": {("", "pods/exec"): "create get"},
}
"""The verbs that role.yaml in these folders of deploy/ allows, by API group and resource."""
_GROUPS = {resource: group for role in ROLES.values() for group, resource in role}
_GROUPS |= {"deployments": "apps", "selfsubjectaccessreviews": "authorization.k8s.io"}


def permission_fix(resource: str, verbs: Iterable[str], namespace: str) -> str:
    """Return the remedy for missing verbs on a resource (`pods/log`); an empty namespace means all."""
    missing, group = list(verbs), _GROUPS.get(resource, "")
    where = f"Role in namespace {namespace}" if namespace else "ClusterRole"
    rule = f'apiGroups ["{group}"], resources ["{resource}"], verbs {json.dumps(missing)}'
    text = f"allow it with a {where}: {rule}"
    for folder, role in ROLES.items() if namespace else ():
        if set(missing) <= set(role.get((group, resource), "").split()):
            text += f"; deploy/{folder}/role.yaml, which `kubedet cluster manifests` writes, allows it"
    return text
