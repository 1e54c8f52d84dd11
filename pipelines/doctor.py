"""Checks of what a run needs, on this machine or in a cluster."""

from collections.abc import Iterator, Mapping

from components import doctor
from components.launchers.cluster.backend import ClusterBackend
from pipelines import HOSTS, Access
from trainer.base.errors import KubedetError
from trainer.launching.doctor import Check, Needs, writable


def check_cluster(
    needs: Needs,
    *,
    namespace: str,
    nodes: int,
    resources: Mapping[str, int],
    step: Mapping[str, str],
    secret: str,
    claim: str,
    queue: str,
    job: str,
    access: Access,
) -> Iterator[Check]:
    """Check a cluster and Kubeflow Pipelines; see `components.doctor.check_cluster`.

    Args:
        needs: of the pods of `job`; its output is checked from this machine.
        namespace: of the jobs; empty is that of the kubeconfig.
        nodes: machines of a job.
        resources: devices of each machine.
        step: requests of a step's pod.
        secret: name of the Secret with the object store's keys.
        claim: name of the data root's claim.
        queue: Kueue's LocalQueue.
        job: a running job, whose pods are checked.
        access: how to reach Kubeflow Pipelines; without a host it is not checked.
    """
    try:
        backend = ClusterBackend.connect(namespace)
        yield from doctor.check_cluster(
            backend, nodes=nodes, resources=resources, secret=secret, claim=claim, step=step
        )
        if queue:
            yield from doctor.check_queue(backend, queue)
        if job:
            yield from doctor.check_pods(backend, job, needs)
    except KubedetError as error:
        yield Check("cluster", "missing", error.message, error.fix)
    if needs.output:
        yield writable(needs.output)
    title = "Kubeflow Pipelines"
    if not access.host:
        yield Check(title, "ok", f"not checked: neither --host nor {HOSTS[0]} names it")
        return
    from pipelines import preflight  # kfp, which takes a while.
    from pipelines.kubeflow import Server, check_version

    yield preflight.image()
    try:
        tag = Server(access).version
        warning = check_version(tag)
    except KubedetError as error:
        yield Check(title, "missing", error.message, error.fix)
        return
    fix = "run the recipe debug to check whether it works there"
    yield Check.ok_if(not warning, title, warning or f"{tag} at {access.host}", fix)
