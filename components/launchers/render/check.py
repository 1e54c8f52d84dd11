"""What the cluster would refuse, or worse, pass over in silence: found before anything is sent.

The operator's webhook has the first rules; enums the resource definition lacks, so a misspelt
policy passes and means nothing; and fields it does not know are cut off without a word.
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
    """Return what is wrong with a PyTorchJob; nothing, if a cluster takes it as it is meant.

    Args:
        manifest: the job as it stands in YAML.
    """
    head = (manifest.get("apiVersion"), manifest.get("kind"))
    if head != (pytorchjob.API_VERSION, pytorchjob.KIND):
        return [f"is {head[0]} {head[1]}, not {pytorchjob.API_VERSION} {pytorchjob.KIND}"]
    spec = manifest.get("spec") or {}
    found = _unknown(manifest)
    name = manifest.get("metadata", {}).get("name", "")
    if not _DNS_1035.fullmatch(name):
        found.append(f"metadata.name {name!r} is not a DNS-1035 label")
    if spec.get("nprocPerNode") and (spec.get("elasticPolicy") or {}).get("nProcPerNode"):
        found.append("spec.elasticPolicy.nProcPerNode stands beside spec.nprocPerNode")
    found += _enum(spec.get("runPolicy") or {}, "cleanPodPolicy", "spec.runPolicy")
    return found + _replicas(spec)


def _replicas(spec: dict[str, Any]) -> list[str]:
    replicas = spec.get("pytorchReplicaSpecs") or {}
    found = []
    if not replicas:
        found.append("spec.pytorchReplicaSpecs is empty")
    if spec.get("elasticPolicy") and "Worker" not in replicas:
        found.append("spec.elasticPolicy needs replicas of type Worker")
    for kind, replica in replicas.items():
        where = f"spec.pytorchReplicaSpecs.{kind}"
        if kind not in ("Master", "Worker"):
            found.append(f"{where}: the types are Master and Worker")
        number = replica.get("replicas")
        if kind == "Master" and number != 1:
            found.append(f"{where}.replicas is {number}, there is one master")
        if kind == "Worker" and (number is None or number < 1):
            found.append(f"{where}.replicas is {number}, not 1 or more")
        found += _enum(replica, "restartPolicy", where)
        containers = replica.get("template", {}).get("spec", {}).get("containers") or []
        if not any(item.get("name") == pod.CONTAINER for item in containers):
            found.append(f"{where} has no container {pod.CONTAINER!r}")
        found += [
            f"{where}: the container {item.get('name')!r} has no image"
            for item in containers
            if not item.get("image")
        ]
    return found


def _enum(fields: dict[str, Any], name: str, where: str) -> list[str]:
    value, allowed = fields.get(name), _POLICIES[name]
    return [] if value is None or value in allowed else [f"{where}.{name} {value!r} is none of {allowed}"]


def _unknown(manifest: dict[str, Any]) -> list[str]:
    """Send it through the SDK's models and back: what they do not know does not return."""
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
