"""The environment of a run's pods: run id, settings and keys of stores and trackers, signing key."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from trainer.base.errors import ConfigError, KubedetError, StorageError

RUN_ID = "KUBEDET_RUN_ID"  # Variable with the id of the run that a step belongs to.
RUN_LABEL = "pipeline/runid"  # Label of a run's pods in Kubeflow; its value is the run's id.
CREDENTIALS = "kubedet-object-store"  # Default name of the Secret with the object store's keys.

_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION",
    "MINIO_ENDPOINT", "GOOGLE_SERVICE_ACCOUNT_KEY",
    "HF_TOKEN",  # For private and gated models of the hub.
)  # fmt: skip
SECRET_KEYS = {name: name for name in _VARIABLES} | {
    "accesskey": "MINIO_ACCESS_KEY",
    "secretkey": "MINIO_SECRET_KEY",  # A key of the Secret `mlpipeline-minio-artifact`.
}
"""The keys that this Secret may have, and the environment variables that they set."""

SETTINGS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE",
    "AWS_SKIP_SIGNATURE", "MINIO_ENDPOINT", "MINIO_SECURE", "MINIO_REGION", "GOOGLE_BASE_URL",
    "GOOGLE_SKIP_SIGNATURE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    # Kubeflow Pipelines (2.17 and later) sets these in pods of steps if an administrator configured MLflow:
    # https://www.kubeflow.org/docs/components/pipelines/operator-guides/mlflow-plugin
    "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_WORKSPACE", "MLFLOW_TRACKING_AUTH",
    "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_BASE_URL", "WANDB_MODE",
)  # fmt: skip
"""Variables whose values are not secret."""

KUBEFLOW_STORES = ("seaweedfs.kubeflow:9000", "minio-service.kubeflow:9000")
"""The object stores of Kubeflow Pipelines: from 2.16.1, and of earlier versions."""

SIGNING_NAME = "kubedet-signing"
"""Default name of the Secret with the key that signs models. Without this Secret nothing is signed."""

SIGNING_KEY = "private.pem"  # The key of that Secret whose value is the PEM file.

SIGNING_FOLDER = "/etc/kubedet/signing"
"""The export step's pod mounts that Secret here. No parameter, variable or artifact contains the key."""

_STORE_KEYS = ("AWS_ACCESS_KEY_ID", "MINIO_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE",
               "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
               "AWS_SHARED_CREDENTIALS_FILE")  # fmt: skip
_SCHEMES = ("s3://", "minio://")
"""URIs that need such keys. For gs://, the error of the storage names missing keys itself."""


def read_run_id() -> str:
    """Return the id of the run that this process works for; "" if it belongs to none."""
    return os.environ.get(RUN_ID, "").strip()


def secret_variables() -> dict[str, str]:
    """Return the secret keys of the object store's Secret, with their environment variables."""
    return {key: name for key, name in SECRET_KEYS.items() if name not in SETTINGS}


def read_settings() -> dict[str, str]:
    """Return the settings of this process, for other pods that use the same stores and trackers."""
    return {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}


def set_minio_endpoint() -> None:
    """In a cluster, resolve `minio://` to Kubeflow's own store, unless another store is set."""
    named = ("MINIO_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if not os.environ.get("KUBERNETES_SERVICE_HOST") or any(os.environ.get(name) for name in named):
        return
    os.environ["MINIO_ENDPOINT"] = KUBEFLOW_STORES[0]
    for endpoint in KUBEFLOW_STORES:
        host, _, port = endpoint.partition(":")
        with suppress(OSError):
            socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            os.environ["MINIO_ENDPOINT"] = endpoint
            return


def add_hint(error: KubedetError, secret: str) -> None:
    """Add a hint to an error if the missing keys of `secret` are its likely cause."""
    of_a_store = isinstance(error, StorageError) and any(scheme in error.message for scheme in _SCHEMES)
    if not secret or not of_a_store or any(os.environ.get(name) for name in _STORE_KEYS):
        return
    error.transient = False  # A Secret created now would not reach this pod.
    error.message += (
        f"\n  this step has no keys for an object store: its namespace has no Secret {secret}, or the Secret "
        "has none of the keys"
    )
    keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or accesskey and secretkey)"
    create = f"create the Secret {secret} with {keys} and, outside of Amazon, AWS_ENDPOINT_URL"
    error.fix = "; or ".join(filter(None, [f"{create}, or name another Secret in `credentials`", error.fix]))


def find_signing_key(secret: str, folder: str = SIGNING_FOLDER) -> str:
    """Return the path of the key that signs models; "" if there is no key and no Secret was named."""
    mounted = Path(folder)
    if (mounted / SIGNING_KEY).is_file():
        return str(mounted / SIGNING_KEY)
    # Kubernetes' own entries in a mounted Secret begin with two dots.
    keys = sorted(path.name for path in mounted.glob("*") if not path.name.startswith(".."))
    if secret == SIGNING_NAME and not keys:
        return ""
    contents = f"it contains {', '.join(keys)}" if keys else "it does not exist, or is empty"
    raise ConfigError(
        f"the Secret {secret} has no signing key: {contents}",
        fix=f"in the run's namespace: kubectl create secret generic {secret} --from-file={SIGNING_KEY}=FILE",
    )
