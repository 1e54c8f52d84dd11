"""Checks a PyTorchJob's manifest for what the cluster would refuse or silently ignore, before it is sent.

The operator's webhook has the first rules; the CRD has no enums, so a misspelt policy is accepted
and ignored; and the API server prunes unknown fields.
Source: kubeflow/training-operator, release-1.9, pkg/webhooks/pytorch and pkg/apis/kubeflow.org/v1.
"""

import re
from typing import Any

from components.launchers.render import pod, pytorchjob

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_POLICIES = {
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "cleanPodPolicy": ("All", "Running", "None"),
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a PyTorchJob, a line for each problem.

    Args:
        manifest: the job as it stands in YAML.
    """
    head = (manifest.get("apiVersion"), manifest.get("kind"))
    if head != (pytorchjob.API_VERSION, pytorchjob.KIND):
        return [f"is {head[0]} {head[1]}, not {pytorchjob.API_VERSION} {pytorchjob.KIND}"]
    spec = manifest.get("spec") or {}
    lines = _unknown(manifest)
    name = manifest.get("metadata", {}).get("name", "")
    if not _DNS_1035.fullmatch(name):
        lines.append(f"metadata.name {name!r} is not a DNS-1035 label")
    if spec.get("nprocPerNode") and (spec.get("elasticPolicy") or {}).get("nProcPerNode"):
        lines.append("spec.elasticPolicy.nProcPerNode stands beside spec.nprocPerNode")
    lines += _enum(spec.get("runPolicy") or {}, "cleanPodPolicy", "spec.runPolicy")
    return lines + _replicas(spec)


def _replicas(spec: dict[str, Any]) -> list[str]:
    replicas = spec.get("pytorchReplicaSpecs") or {}
    lines = []
    if not replicas:
        lines.append("spec.pytorchReplicaSpecs is empty")
    if spec.get("elasticPolicy") and "Worker" not in replicas:
        lines.append("spec.elasticPolicy needs replicas of type Worker")
    for kind, replica in replicas.items():
        where = f"spec.pytorchReplicaSpecs.{kind}"
        if kind not in ("Master", "Worker"):
            lines.append(f"{where}: the types are Master and Worker")
        number = replica.get("replicas")
        if kind == "Master" and number != 1:
            lines.append(f"{where}.replicas is {number}, there is one master")
        if kind == "Worker" and (number is None or number < 1):
            lines.append(f"{where}.replicas is {number}, not 1 or more")
        lines += _enum(replica, "restartPolicy", where)
        containers = replica.get("template", {}).get("spec", {}).get("containers") or []
        if not any(item.get("name") == pod.CONTAINER for item in containers):
            lines.append(f"{where} has no container {pod.CONTAINER!r}")
        lines += [
            f"{where}: the container {item.get('name')!r} has no image"
            for item in containers
            if not item.get("image")
        ]
    return lines


def _enum(fields: dict[str, Any], name: str, where: str) -> list[str]:
    value, allowed = fields.get(name), _POLICIES[name]
    return [] if value is None or value in allowed else [f"{where}.{name} {value!r} is none of {allowed}"]


def _unknown(manifest: dict[str, Any]) -> list[str]:
    """Return the fields that do not survive a round trip through the SDK's models."""
    from kubeflow.training import ApiClient, KubeflowOrgV1PyTorchJob
    from kubeflow.training.utils.utils import FakeResponse

    client = ApiClient()
    try:
        returned = client.sanitize_for_serialization(
            client.deserialize(FakeResponse(manifest), KubeflowOrgV1PyTorchJob)
        )
    except (ValueError, TypeError, AttributeError) as error:
        return [f"does not fit the SDK's models: {error}"]
    return difference(manifest, returned)


def difference(sent: Any, returned: Any, path: str = "") -> list[str]:
    """Return what of a manifest did not come back from somewhere, a line for each field.

    Args:
        sent: the manifest.
        returned: what came back.
        path: where both stand; empty is the whole.
    """
    if isinstance(sent, dict) and isinstance(returned, dict):
        missing = [f"{path}{key}: no such field" for key in sent if key not in returned]
        common = [key for key in sent if key in returned]
        return missing + [
            line for key in common for line in difference(sent[key], returned[key], f"{path}{key}.")
        ]
    if isinstance(sent, list) and isinstance(returned, list) and len(sent) == len(returned):
        pairs = enumerate(zip(sent, returned, strict=True))
        return [
            line
            for number, (left, right) in pairs
            for line in difference(left, right, f"{path.removesuffix('.')}[{number}].")
        ]
    return [] if sent == returned else [f"{path.removesuffix('.')}: {sent!r} would arrive as {returned!r}"]
