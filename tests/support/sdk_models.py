"""What of a manifest the models of Kubeflow's SDKs do not know: the API server would prune it."""

from typing import Any

from kubeflow.training import ApiClient, KubeflowOrgV1PyTorchJob
from kubeflow.training.utils.utils import FakeResponse
from kubeflow_trainer_api import models


def lost_fields(manifest: dict[str, Any]) -> list[str]:
    """Fields of a job or runtime that do not survive a round trip, a line for each."""
    if manifest["kind"] == "PyTorchJob":
        client = ApiClient()
        model = client.deserialize(FakeResponse(manifest), KubeflowOrgV1PyTorchJob)
        return _difference(manifest, client.sanitize_for_serialization(model))
    return _difference(
        manifest, getattr(models, f"TrainerV1alpha1{manifest['kind']}").from_dict(manifest).to_dict()
    )


def _difference(sent: Any, returned: Any, path: str = "") -> list[str]:
    if isinstance(sent, dict) and isinstance(returned, dict):
        missing = [f"{path}{key}: missing" for key in sent if key not in returned]
        common = [key for key in sent if key in returned]
        return missing + [
            line for key in common for line in _difference(sent[key], returned[key], f"{path}{key}.")
        ]
    path = path.removesuffix(".")
    if isinstance(sent, list) and isinstance(returned, list) and len(sent) == len(returned):
        pairs = enumerate(zip(sent, returned, strict=True))
        return [line for number, pair in pairs for line in _difference(*pair, f"{path}[{number}].")]
    return [] if sent == returned else [f"{path}: {sent!r} would arrive as {returned!r}"]
