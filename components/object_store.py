"""How the pods of a run reach the object store: the variables of their environment.

The names are those that `trainer/storage/environment.py` reads. Values that are secret stay in a
Secret, to which pods refer by name and key; the settings may be seen by everybody.
"""

import os
import socket

from trainer.base.errors import KubedetError, StorageError

CREDENTIALS = "kubedet-object-store"
"""Name of the Secret, where nobody names another."""

SECRET_KEYS = {
    "AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN": "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL": "AWS_ENDPOINT_URL",
    "AWS_REGION": "AWS_REGION",
    "MINIO_ENDPOINT": "MINIO_ENDPOINT",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME": "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY": "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN": "AZURE_STORAGE_SAS_TOKEN",
    # For private and gated models of the Hugging Face hub, which steps and trainings may start from.
    "HF_TOKEN": "HF_TOKEN",
    # What Kubeflow's own Secret `mlpipeline-minio-artifact` holds.
    "accesskey": "MINIO_ACCESS_KEY",
    "secretkey": "MINIO_SECRET_KEY",
}
"""Keys of the Secret, none of them required, and the variables they become."""

SETTINGS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "MINIO_ENDPOINT",
    "MINIO_SECURE",
    "MINIO_REGION",
    "GOOGLE_BASE_URL",
    "GOOGLE_SKIP_SIGNATURE",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_USE_EMULATOR",
    "AZURE_SKIP_SIGNATURE",
    "AWS_CA_BUNDLE",
    "AWS_SKIP_SIGNATURE",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)
"""Variables that are no secret."""

KUBEFLOW_STORES = ("seaweedfs.kubeflow:9000", "minio-service.kubeflow:9000")
"""The object stores that come with Kubeflow Pipelines, from every namespace of its cluster: since 2.16.1, and
before."""

_KEYS = ("AWS_ACCESS_KEY_ID", "MINIO_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE",
         "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
         "AWS_SHARED_CREDENTIALS_FILE")  # fmt: skip
_SCHEMES = ("s3://", "minio://")
"""What these keys are for: of gs:// and az:// the storage itself says what is missing."""


def secret_variables() -> dict[str, str]:
    """Return the keys of the Secret whose values are secret, and the variables they become."""
    return {key: name for key, name in SECRET_KEYS.items() if name not in SETTINGS}


def settings() -> dict[str, str]:
    """Return the settings of this process, for another pod that must reach the same store."""
    return {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}


def set_defaults() -> None:
    """In a cluster, let `minio://` mean Kubeflow's own store where nothing else is set."""
    named = ("MINIO_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not any(os.environ.get(name) for name in named):
        os.environ["MINIO_ENDPOINT"] = next(filter(_resolves, KUBEFLOW_STORES), KUBEFLOW_STORES[0])


def _resolves(endpoint: str) -> bool:
    """Whether the cluster knows a Service of that name."""
    host, _, port = endpoint.partition(":")
    try:
        return bool(socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM))
    except OSError:
        return False


def explain(error: KubedetError, secret: str) -> None:
    """Add to a storage error that this pod has no keys: without them it looks like a network fault.

    Args:
        error: what a step failed with; changed.
        secret: name of the Secret that the run names; empty is none.
    """
    of_a_store = isinstance(error, StorageError) and any(scheme in error.message for scheme in _SCHEMES)
    if not secret or not of_a_store or any(os.environ.get(name) for name in _KEYS):
        return
    error.passing = False  # A Secret that is made meanwhile does not come into this pod.
    error.message += (
        f"\n  the environment of this step holds no keys of an object store: the Secret {secret} is not in "
        "its namespace, or has none of the keys"
    )
    keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or accesskey and secretkey)"
    create = f"create the Secret {secret} with {keys} and, outside of Amazon, AWS_ENDPOINT_URL"
    error.fix = "; or ".join(filter(None, [f"{create}, or name another with `credentials`", error.fix]))
