"""Where Kubeflow Pipelines is: what is named, and what the environment says."""

import os
from dataclasses import dataclass

HOSTS = ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
"""Variables with the API's URL, the first of kfp's command line and the second of its client."""

UI = "KF_PIPELINES_UI_ENDPOINT"
"""Variable with the URL of the UI where it is another, as kfp's client has it."""

NAMESPACE = "KFP_NAMESPACE"
"""Variable with the namespace, as kfp's command line has it."""


@dataclass(frozen=True)
class Access:
    """Where Kubeflow Pipelines is."""

    host: str = ""
    """URL of the API; empty is the cluster around this process, or that of the kubeconfig."""
    namespace: str = ""
    """Namespace of the runs, in a Kubeflow for several users; empty is the pod's own there."""
    ca: str = ""
    """File with the certificate of the authority that signed the server's."""

    @classmethod
    def find(cls, host: str = "", namespace: str = "", ca: str = "") -> "Access":
        """Return what is named, and of the environment what is not."""
        hosts = [host, *(os.environ.get(name, "") for name in HOSTS)]
        url = next((url for url in hosts if url), "").rstrip("/")
        return cls(url, namespace or os.environ.get(NAMESPACE, ""), ca)
