"""The cluster that KUBECONFIG names, and somebody at its command line. README.md tells of the variables."""

import os
import time
import uuid
from pathlib import Path

import pytest
import yaml

from components.launchers.cluster import job_objects
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS as job_kinds
from tests.cluster.runs import Runs
from tests.cluster.user import KINDS, Cluster, User, until

NEEDED = ("KUBECONFIG", "KUBEDET_IMAGE", "KUBEDET_DATA_ROOT")


def pytest_collection_modifyitems(items):
    """Everything here needs a cluster and takes its time."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = [name for name in NEEDED if not os.environ.get(name)]
    for item in here:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(3000))
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"no cluster is named: set {', '.join(missing)}"))


@pytest.fixture(scope="session", params=KINDS)
def cluster(request):
    """The cluster, once for each kind of jobs; skipped where it does not know the kind."""
    from kubernetes import client, config

    config.load_kube_config()
    namespace = os.environ.get("KUBEDET_NAMESPACE", "kubeflow")
    api = client.ApiClient()
    kind = KINDS[request.param]
    test_cluster = Cluster(client.CoreV1Api(api), client.CustomObjectsApi(api), namespace, kind)
    try:
        test_cluster.custom.list_namespaced_custom_object(
            kind.group, kind.version, namespace, kind.plural, limit=1
        )
    except client.ApiException as error:
        if error.status != 404:
            raise
        pytest.skip(f"the cluster does not know {kind.title}s")
    # On a busy node a controller's webhook may be away for a while.
    launcher = ClusterBackend.connect(namespace).cluster
    until(
        lambda: not job_objects.dry_run_problem(launcher, job_kinds[kind.name]),
        f"the controller of {kind.title}s answers",
    )
    return test_cluster


@pytest.fixture(scope="session")
def common(cluster):
    """Fields of every job's specification."""
    fields = {
        "cpu_request": "100m",
        "memory_request": "256Mi",
        "shared_memory": "256Mi",
        "start_timeout": 300,
    }
    if os.environ.get("KUBEDET_PVC"):
        mount = {"claim": os.environ["KUBEDET_PVC"], "path": os.environ["KUBEDET_DATA_ROOT"]}
        fields["mounts"] = [mount]
    if os.environ.get("KUBEDET_SPEC"):
        fields |= yaml.safe_load(Path(os.environ["KUBEDET_SPEC"]).read_text())
    return {**fields, "image": os.environ["KUBEDET_IMAGE"], "namespace": cluster.namespace}


@pytest.fixture(scope="session")
def work(cluster):
    """URI of a folder under the data root that this run of the tests has to itself."""
    root = os.environ["KUBEDET_DATA_ROOT"].rstrip("/")
    return f"{root}/kubedet-tests/{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}-{cluster.kind.name}"


@pytest.fixture(scope="session")
def pipeline_work(work):
    """URI of the data root of the pipeline's runs, in a bucket where one is named."""
    return f"{os.environ.get('KUBEDET_BUCKET', '').rstrip('/') or work}/pipeline"


@pytest.fixture
def user(cluster, common, tmp_path):
    """Someone at the command line; what they leave behind is removed."""
    someone = User(cluster, common, tmp_path)
    yield someone
    someone.leave()


@pytest.fixture(scope="session")
def host():
    """Address of Kubeflow Pipelines; skipped where none is named, or none answers."""
    import kfp

    address = os.environ.get("KUBEDET_KFP", "")
    if not address:
        pytest.skip("no Kubeflow Pipelines is named: set KUBEDET_KFP")
    try:
        kfp.Client(host=address).get_kfp_healthz()
    except Exception as error:
        pytest.skip(f"Kubeflow Pipelines at {address} does not answer: {error}")
    return address


@pytest.fixture
def runs(host, cluster, pipeline_work):
    """Runs of one test, on data that all of them share."""
    cluster_runs = Runs(host, cluster, pipeline_work)
    yield cluster_runs
    cluster_runs.leave()
