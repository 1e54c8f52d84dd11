"""The pipeline and the operator's command line. Importing this package imports neither kfp nor torch."""

import os
from dataclasses import dataclass

NAME = "kubedet"  # Name of the pipeline.

TITLES = {
    "download": "Download",
    "convert-to-shards": "Convert to shards",
    "train": "Train",
    "evaluate": "Evaluate and decide",
    "export": "Export",
}
"""The steps in order, as people see them."""

SEARCH = {"trial": "Train a trial", "best": "Choose the best"}
"""The steps that follow the data in a search for hyper-parameters."""

CLEANUP = {"cleanup": "Clean up"}  # The step that ends every run in a cluster.

HOSTS = ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
"""Variables with the API's URL: of kfp's command line, and of its client."""

UI = "KF_PIPELINES_UI_ENDPOINT"  # Variable with the URL of the UI if it differs, as in kfp's client.

NAMESPACE = "KFP_NAMESPACE"  # Variable with the namespace, as in kfp's command line.


@dataclass(frozen=True)
class Access:
    """How to reach Kubeflow Pipelines."""

    host: str = ""  # URL of the API; empty is the cluster around this process, or that of the kubeconfig.
    namespace: str = ""  # Namespace of the runs in a multi-user Kubeflow; empty is the pod's namespace.
    ca: str = ""  # File with the certificate of the authority that signed the server's.

    @classmethod
    def find(cls, host: str = "", namespace: str = "", ca: str = "") -> "Access":
        """Return the given values, with missing ones from the environment."""
        hosts = [host, *(os.environ.get(name, "") for name in HOSTS)]
        url = next((url for url in hosts if url), "").rstrip("/")
        return cls(url, namespace or os.environ.get(NAMESPACE, ""), ca)
