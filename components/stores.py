"""How the pods of a run come to the object store: what they are given in their environment.

The names are those that `trainer/storage/environment.py` reads. Values that are secret stay in a
Secret, to which pods refer by name and key; the settings may be seen by everybody.
"""

import os

CREDENTIALS = "kubedet-object-store"
"""Name of the Secret, where nobody names another."""

SECRET_KEYS = {
    "AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN": "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL": "AWS_ENDPOINT_URL",
    "AWS_REGION": "AWS_REGION",
    "MINIO_ENDPOINT": "MINIO_ENDPOINT",
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
    "AWS_CA_BUNDLE",
    "AWS_SKIP_SIGNATURE",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)
"""Variables that are no secret."""

KUBEFLOW_STORE = "minio-service.kubeflow:9000"
"""The object store that comes with Kubeflow Pipelines, from every namespace of its cluster."""


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
        os.environ["MINIO_ENDPOINT"] = KUBEFLOW_STORE
