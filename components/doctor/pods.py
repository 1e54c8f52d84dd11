"""Checks inside the pods of a running job."""

import json
from collections.abc import Iterator
from dataclasses import replace

from components.launchers.backend import Phase
from components.launchers.cluster import pod_exec
from components.launchers.cluster.backend import ClusterBackend
from trainer.base.errors import KubedetError
from trainer.launching.doctor import Check, Needs


def check(backend: ClusterBackend, job: str, needs: Needs) -> Iterator[Check]:
    """Run the trainer's own doctor in every pod of a job.

    Args:
        backend: where the job runs.
        job: its name.
        needs: what must be in each pod.
    """
    status = backend.status(job)
    if status.phase is Phase.GONE:
        where = backend.cluster.namespace
        yield Check(f"job {job}", "missing", f"namespace {where} has none", "see `kubedet job list`")
        return
    running = [pod for pod in status.pods if pod.phase == "Running"]
    if not running:
        yield Check(f"job {job}", "missing", f"is {status.phase}, no pod runs", "name a job that runs")
    core, namespace = backend.cluster.core, backend.cluster.namespace
    for pod in running:
        try:
            _, out = pod_exec.captured(core, namespace, pod, _command(needs))
            for result in [Check(**item) for item in json.loads(out)]:
                yield replace(result, title=f"{pod.name}: {result.title}")
        except KubedetError as error:
            yield Check(pod.name, "missing", error.message, error.fix)
        except (ValueError, TypeError):
            fix = "see that the image holds this version of kubedet"
            yield Check(pod.name, "missing", "`python -m trainer doctor` does not work in it", fix)


def _command(needs: Needs) -> list[str]:
    words = ["python", "-m", "trainer", "doctor", "--json", "--gpus", str(needs.gpus)]
    words += ["--rdma"] if needs.rdma else []
    words += ["--interface", needs.interface] if needs.interface else []
    return words + (["--shared-memory", str(needs.shared_memory)] if needs.shared_memory else [])
