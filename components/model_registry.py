"""Registers an exported model in a Kubeflow Model Registry. Existing entries are not created again."""

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

from trainer.base.errors import ConfigError, ExportError, install_command
from trainer.export import bundle
from trainer.export.metadata import Metadata

_TOKEN_PATHS = ("KF_PIPELINES_SA_TOKEN_PATH", "/var/run/secrets/kubernetes.io/serviceaccount/token")
_AUTHOR = "kubedet"


def register_model(uri: str, server: str, run_id: str) -> dict[str, str]:
    """Register the version of the bundle at a URI unless it exists; return the ids in the registry."""
    check_server(server)
    metadata = bundle.load(uri).metadata
    try:
        import aiohttp
        from mr_openapi.exceptions import ApiException
    except ImportError as error:
        raise ConfigError(
            f"the model registry's client is not installed ({error.name})",
            fix=install_command("registry"),
        ) from None
    try:
        return asyncio.run(_register(metadata, uri, server, run_id))
    except ApiException as error:
        refused = error.status in (401, 403)
        raise ExportError(
            f"the model registry {server} refused the request: {error.status} {error.reason}",
            fix="check the token of the step's service account and its role in the registry"
            if refused
            else "look at the registry's log, and run the step again",
            transient=(error.status or 0) >= 500,
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ExportError(
            f"the model registry {server} cannot be reached: {str(error) or type(error).__name__}",
            fix="check the URL, the namespace and network policies, and run the step again",
            transient=True,
        ) from error


def check_server(server: str) -> None:
    """Raise ConfigError if the URL of a registry cannot be used."""
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the model registry {server!r} is not a URL",
            fix="write it like http://model-registry-service.kubeflow:8080",
        )


async def _register(metadata: Metadata, uri: str, server: str, run_id: str) -> dict[str, str]:
    from model_registry.core import ModelRegistryAPIClient
    from model_registry.types import ModelArtifact, ModelVersion, RegisteredModel

    parts, path = urlsplit(server), Path(os.environ.get(_TOKEN_PATHS[0]) or _TOKEN_PATHS[1])
    token, address = path.read_text().strip() if path.is_file() else None, server.rstrip("/")
    if parts.scheme == "http":
        api = ModelRegistryAPIClient.insecure_connection(address, parts.port or 8080, token)
    elif token:
        port = parts.port or 443
        api = ModelRegistryAPIClient.secure_connection(address, port, user_token=token, custom_ca=None)
    else:
        raise ConfigError(
            f"the model registry {server} needs a token, but this pod has none",
            fix=f"set {_TOKEN_PATHS[0]} to the path of the token's file",
        )
    name, version = metadata.name, metadata.model_version
    model = await api.get_registered_model_by_params(name)
    model = model or await api.upsert_registered_model(RegisteredModel(name=name, owner=_AUTHOR))
    model_version = await api.get_model_version_by_params(model.id, version)
    if model_version is None:
        metrics = {metric: float(value) for metric, value in metadata.metrics.values.items()}
        properties: dict[str, float | str] = {**metrics}
        properties |= {"shards": metadata.trained_on.shards, "formats": ", ".join(metadata.formats)}
        properties["kubedet"] = metadata.versions["kubedet"]
        description = ModelVersion(name=version, author=_AUTHOR, custom_properties=properties)
        model_version = await api.upsert_model_version(description, model.id)
    artifact = await api.get_model_artifact_by_params(name, model_version.id)
    if artifact is None:
        kind = next(iter(metadata.formats)).partition("-")[0]
        source = {"model_source_kind": "kfp", "model_source_id": run_id} if run_id else {}
        description = ModelArtifact(
            name=name, uri=uri, model_format_name=kind, model_format_version="1", **source
        )
        artifact = await api.upsert_model_version_artifact(description, model_version.id)
    return {"model": model.id, "version": model_version.id, "artifact": artifact.id}
