"""Checks of a cluster and Kubeflow Pipelines: a full check, and a check before a run is submitted."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kubernetes import client

from components import cluster_checks, launchers
from components.cluster_checks import PodRequests
from components.images import COMPONENT_IMAGE
from components.launchers.backend import Timings
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster, connect
from components.launchers.cluster.pods import list_pods
from pipelines import HOST_VARIABLES, Access
from trainer.base.errors import ConfigError, KubedetError
from trainer.launching.machine_checks import Check

if TYPE_CHECKING:
    from pipelines.submission import Submission

_STANDALONE = "kubeflow"  # Usual namespace of Kubeflow Pipelines for a single user, and of its runs.
_TIMINGS = Timings(connect=3.0, read=10.0, patience=0.0)
_KEY_SCHEMES = ("s3://", "minio://")  # Data roots that usually need the keys of a Secret.


def check_submission(submission: "Submission", namespace: str) -> None:
    """Print warnings about missing resources of a run; raise ConfigError if its Secret or claim is missing.

    `namespace` is a profile's, or empty. If the cluster's API does not respond, or if the namespace of the
    runs is unknown, only the image is checked.
    """
    findings = [check_image()]
    required: set[str] = set()
    if cluster := _cluster_of_runs(namespace):
        secret, claim = submission.parameters.get("credentials", ""), submission.parameters.get("claim", "")
        required = {f"secret {secret}", f"volume claim {claim}"}
        if not secret and submission.get("data_root").startswith(_KEY_SCHEMES):
            secret = submission.get("credentials")
        nodes, pod_requests = submission.build_job().nodes, _pod_requests(submission)
        findings += cluster_checks.check_requirements(
            cluster, secret=secret, claim=claim, nodes=nodes, pod_requests=pod_requests
        )
    for item in findings:
        if item.state == "missing" and item.title in required and cluster:
            where = f"in namespace {cluster.namespace}"
            raise ConfigError(f"the run cannot start: {item.title} {where}: {item.detail}", fix=item.fix)
        if item.state != "ok" and not item.detail.startswith(cluster_checks.UNKNOWN_PREFIX):
            print(f"warning: {item.title}: {item.detail}\n  fix: {item.fix}", file=sys.stderr)


def check_image() -> Check:
    """Check whether the image of the steps was set: a cluster does not have the default image."""
    is_set = bool(os.environ.get("KUBEDET_IMAGE"))
    detail = COMPONENT_IMAGE if is_set else f"KUBEDET_IMAGE is not set: nodes must have {COMPONENT_IMAGE}"
    return Check.from_bool(
        is_set, "image", detail, "push the image (`make images`), and set KUBEDET_IMAGE to its name"
    )


def _cluster_of_runs(namespace: str) -> Cluster | None:
    """Return the cluster with the namespace of the runs; None if either is unknown or does not answer."""
    try:
        cluster = connect(namespace, timings=_TIMINGS)
        cluster.call("get", "version", client.VersionApi(cluster.api).get_code)
    except (ConfigError, ApiError):
        return None
    if namespace:
        return cluster
    for name in dict.fromkeys([_STANDALONE, cluster.namespace]):
        with suppress(ApiError):  # This user may not read that namespace.
            if list_pods(cluster.in_namespace(name), "app=ml-pipeline"):
                return cluster.in_namespace(name)
    return None


def _pod_requests(submission: "Submission") -> Iterator[PodRequests]:
    """Yield the requests of a step's pod, and of the pods of jobs unless these wait in a queue."""
    from pipelines.pipeline import GPU  # Importing kfp takes a while.

    options, job = submission.options, submission.build_job()
    step = {"cpu": submission.get("step_cpu"), "memory": submission.get("step_memory")}
    yield PodRequests("a step", step | ({GPU: str(options.gpus)} if options.gpus else {}))
    if not launchers.in_pods(submission.get("launcher")) or job.kueue_queue:
        return
    workers = submission.get("data_workers")
    if workers > 1:
        yield PodRequests("a data worker", step, workers)
    if not (options.until or options.trials):
        requests = {
            "cpu": job.cpu_request or job.cpu_limit,
            "memory": job.memory_request or job.memory_limit,
            job.gpu_resource: str(job.gpus or ""),
            **{name: str(number) for name, number in job.resources.items()},
        }
        requests = {name: text for name, text in requests.items() if text}
        yield PodRequests("a training pod", requests, job.elastic.min_nodes if job.elastic else job.nodes)


def check_cluster(
    *, nodes: int, resources: Mapping[str, int], secret: str, claim: str, access: Access
) -> Iterator[Check]:
    """Check a cluster and Kubeflow Pipelines (see `components.cluster_checks.check_cluster`).

    Args:
        nodes: machines of a job.
        resources: devices of each machine.
        secret: name of the Secret with the object store's keys.
        claim: name of the data root's claim.
        access: the namespace of the jobs, and Kubeflow Pipelines, which is not checked without a host.
    """
    try:
        yield from cluster_checks.check_cluster(
            ClusterBackend.connect(access.namespace),
            nodes=nodes,
            resources=resources,
            secret=secret,
            claim=claim,
        )
    except KubedetError as error:
        yield Check("cluster", "missing", error.message, error.fix)
    title = "Kubeflow Pipelines"
    if not access.host:
        yield Check(title, "ok", f"not checked: neither --host nor {HOST_VARIABLES[0]} is set")
        return
    from pipelines.kubeflow import Server, check_version  # Importing kfp takes a while.

    yield check_image()
    try:
        tag = Server(access).version
        warning = check_version(tag)
    except KubedetError as error:
        yield Check(title, "missing", error.message, error.fix)
        return
    fix = "run the recipe debug to check whether this version works"
    yield Check.from_bool(not warning, title, warning or f"{tag} at {access.host}", fix)
