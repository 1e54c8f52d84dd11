"""TrainJobs of Kubeflow Trainer, v2."""

from collections.abc import Iterable, Mapping

from components.launchers.backend import Phase
from components.launchers.cluster.kinds.kind import Body, Kind, Look, Standing, by_condition, holding
from components.launchers.render import check_trainjob, trainjob
from components.launchers.spec import JobSpec
from trainer.launching.job_status import Progress

_FINAL = {"Failed": Phase.FAILED, "Complete": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED}


class TrainJob(Kind):
    """A JobSet of one Job, whose pods are the nodes; it has no condition for a job that runs."""

    name = "trainjob"
    title = "TrainJob"
    controller = "Kubeflow Trainer (v2.3) and JobSet"
    group, version, plural = trainjob.GROUP, "v1alpha1", "trainjobs"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    attempt_label = "jobset.sigs.k8s.io/restart-attempt"

    def manifests(self, job: JobSpec, exists: Look) -> list[Body]:
        """Return the job, preceded by a runtime of its own where the shared one does not fit."""
        shared = trainjob.fits_shared(job) and exists("trainingruntimes", trainjob.SHARED)
        return trainjob.manifests(job, shared=shared)

    def problems(self, manifests: list[Body]) -> list[str]:
        """Check what the webhooks would refuse, and what the API server would prune."""
        return check_trainjob.problems(manifests)

    def left_out(self, job: JobSpec) -> list[str]:
        """Name what a TrainJob has no field for."""
        return trainjob.left_out(job)

    def probe(self) -> Body:
        """Return a job of a runtime that does not exist: a controller that answers says so."""
        reference = {"apiGroup": trainjob.GROUP, "kind": trainjob.RUNTIME, "name": "kubedet-probe"}
        return {
            "apiVersion": trainjob.API_VERSION, "kind": trainjob.KIND,
            "metadata": {"generateName": "kubedet-probe-"}, "spec": {"runtimeRef": reference},
        }  # fmt: skip

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        """Read the index that the Job gives each pod."""
        return int(labels.get("batch.kubernetes.io/job-completion-index", 0))

    def nodes(self, job: Body) -> int:
        """Return the number that the job names."""
        return (job["spec"].get("trainer") or {}).get("numNodes") or 1

    def needed(self, job: Body) -> int:
        """Return all nodes, or the fewest of an elastic job."""
        fewest, _, _ = self._bounds(job).partition(":")
        return int(fewest) if fewest else self.nodes(job)

    def elastic(self, job: Body) -> bool:
        """Whether the job has bounds on its nodes."""
        return bool(self._bounds(job))

    def _bounds(self, job: Body) -> str:
        return (job["metadata"].get("annotations") or {}).get(trainjob.ELASTIC, "")

    def standing(self, job: Body) -> Standing:
        """Read the conditions."""
        if standing := by_condition(holding(job), _FINAL):
            return standing
        return Standing(Phase.SUSPENDED if job["spec"].get("suspend") else None)

    def progress(self, job: Body) -> Progress | None:
        """Read what the training reported to the controller."""
        status = (job.get("status") or {}).get("trainerStatus") or {}
        if "progressPercentage" not in status:
            return None
        metrics = {
            item["name"]: float(item["value"]) for item in status.get("metrics") or [] if _number(item)
        }
        return Progress(status["progressPercentage"], status.get("estimatedRemainingSeconds"), metrics)

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the job, its JobSet and its Job."""
        return ((self.title, name), ("JobSet", name), ("Job", f"{name}-{trainjob.NODE}-0"))

    def last_exit(self, messages: Iterable[str], pod: str) -> str:
        """Return nothing: no event holds a pod's exit code."""
        return ""


def _number(metric: Mapping[str, str]) -> bool:
    try:
        float(metric["value"])
    except (LookupError, ValueError):
        return False
    return True
