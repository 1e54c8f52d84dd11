"""The pipeline, and clients of clusters. Importing this package imports neither kfp nor torch."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

PIPELINE_NAME = "kubedet"  # Name of the pipeline.

STEP_TITLES = {
    "download": "Download",
    "convert-to-shards": "Convert to shards",
    "train": "Train",
    "evaluate": "Evaluate and decide",
    "export": "Export",
}
"""The titles of the steps, in their order."""

SEARCH_TITLES = {"trial": "Train a trial", "best": "Choose the best"}
"""The steps that follow the data in a search for hyper-parameters."""

CLEANUP_TITLE = {"cleanup": "Clean up"}  # The step that ends every run in a cluster.

HOST_VARIABLES = ("KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
"""Environment variables with the API's URL, as in kfp's command line and in its client."""

UI_VARIABLE = "KF_PIPELINES_UI_ENDPOINT"  # Variable with the UI's URL if it differs, as in kfp's client.

NAMESPACE_VARIABLE = "KFP_NAMESPACE"  # Variable with the namespace, as in kfp's command line.


@dataclass(frozen=True, kw_only=True)
class Access:
    """Address and credentials of Kubeflow Pipelines.

    A token, if needed, is read from the variable KFP_EXISTING_TOKEN, as by kfp, or from the pod.

    Args:
        host: URL of the API of Kubeflow Pipelines (default: $KFP_ENDPOINT; without it the cluster around this
            process, or that of the kubeconfig)
        namespace: your profile's namespace, if several users share the installation (default: $KFP_NAMESPACE)
        ca: CA certificate of the host
    """

    host: Annotated[str, "URL"] = ""
    namespace: Annotated[str, "NAME"] = ""
    ca: Annotated[str, "FILE"] = ""

    @classmethod
    def resolve(cls, host: str = "", namespace: str = "", ca: str = "") -> "Access":
        """Return the given values, with missing ones from the environment."""
        hosts = [host, *(os.environ.get(name, "") for name in HOST_VARIABLES)]
        url = next((url for url in hosts if url), "").rstrip("/")
        return cls(host=url, namespace=namespace or os.environ.get(NAMESPACE_VARIABLE, ""), ca=ca)


@dataclass(frozen=True, kw_only=True)
class JobTarget:
    """The namespace and backend of training jobs.

    Args:
        namespace: namespace of the jobs (default: KUBECONFIG's, or that of the pod)
        backend: kubernetes: all kinds of jobs in the cluster; pytorchjob or trainjob: only that kind; runai:
            Run:ai's command line
        project: Run:ai project, with the backend runai (default: set by `runai project set`)
    """

    namespace: Annotated[str, "NAME"] = ""
    backend: Literal["kubernetes", "pytorchjob", "trainjob", "runai"] = "kubernetes"
    project: Annotated[str, "NAME"] = ""
