"""Kubeflow Trainer, JobSet and the Job controller, as a launcher sees them, for a FakeCluster.

Recorded of Trainer v2.3.0 and JobSet v0.12.0 on Kubernetes 1.33: names, labels, conditions and their
words, and what the end of a pod means. The policies are those of the runtime that was sent.
"""

import copy

from fake_jobset import JobSetRun
from fake_pod import now

TRAINJOBS, RUNTIMES = "trainjobs", "trainingruntimes"
GROUP = "trainer.kubeflow.org"
DENIED = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
AWAY = (
    'Internal error occurred: failed calling webhook "validator.trainjob.trainer.kubeflow.org": failed to '
    'call webhook: Post "https://kubeflow-trainer-controller-manager.kubeflow-system.svc:443/validate": '
    'no endpoints available for service "kubeflow-trainer-controller-manager"'
)


class FakeTrainer:
    def __init__(self, cluster):
        self.cluster = cluster
        self.works = True  # Whether pods are made.
        self.away = False  # Whether the webhook does not answer.
        self.pause = 0.06  # Seconds in which there are no pods, between the old ones and the new ones.
        self.collection_seconds = 0.0  # How long a runtime stays whose job is gone.
        self._runs = {}

    def refusal(self, resource, namespace, body):
        if self.away:
            return 500, AWAY
        if resource == RUNTIMES:
            return None
        reference = body["spec"]["runtimeRef"]
        if (RUNTIMES, namespace, reference["name"]) not in self.cluster.objects:
            absent = f'TrainingRuntime.trainer.kubeflow.org "{reference["name"]}" not found'
            must = "specified trainingRuntime must be created before the TrainJob is created"
            return 403, f"{DENIED}spec.runtimeRef: Invalid value: {{...}}: {absent}: {must}"
        return None

    def create(self, namespace, body):
        """Store a TrainJob and, unless it is suspended, make its pods."""
        job = self.cluster.add(TRAINJOBS, namespace, body)
        if self.works:
            runtime = self.cluster.objects[RUNTIMES, namespace, job["spec"]["runtimeRef"]["name"]]
            self._runs[job["metadata"]["uid"]] = run = JobSetRun(self, job, copy.deepcopy(runtime))
            run.begin()
        return job

    def suspend(self, job):
        """Do as Kueue does that takes a job back."""
        job["spec"]["suspend"] = True
        self._run(job).suspend()

    def resume(self, job):
        """Do as Kueue does that admits a job."""
        job["spec"]["suspend"] = False
        self._run(job).resume()

    def too_late(self, job):
        self._run(job).deadline()

    def ended(self, pod):
        self._act(pod, "ended")

    def removed(self, pod):
        self._act(pod, "removed")

    def _act(self, pod, what):
        for run in list(self._runs.values()):
            if pod in run.pods:
                getattr(run, what)(pod)

    def _run(self, job):
        return self._runs[job["metadata"]["uid"]]

    def delete(self, namespace, name):
        """Delete a TrainJob; its pods, and the runtimes that it owns, follow."""
        job = self.cluster.objects.pop((TRAINJOBS, namespace, name))
        if run := self._runs.pop(job["metadata"]["uid"], None):
            run.over()
        self.cluster.later(self.collection_seconds, self._collect, job["metadata"]["uid"])

    def _collect(self, uid):
        for key, body in list(self.cluster.objects.items()):
            owners = [owner["uid"] for owner in body["metadata"].get("ownerReferences") or []]
            if key[0] == RUNTIMES and owners == [uid]:
                del self.cluster.objects[key]

    def progress(self, job, percent, seconds=None, **metrics):
        """Do as the status server does that a training tells how far it is."""
        values = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        status = {"progressPercentage": percent, "metrics": values, "lastUpdatedTime": now()}
        if seconds is not None:
            status["estimatedRemainingSeconds"] = seconds
        job.setdefault("status", {})["trainerStatus"] = status

    def condition(self, job, kind, reason="", message="", status="True"):
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [item for item in conditions if item["type"] != kind]
        conditions.append({"type": kind, "status": status, "reason": reason, "message": message,
                           "lastTransitionTime": now()})  # fmt: skip
