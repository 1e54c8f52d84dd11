"""Kubeflow Trainer, JobSet and the Job controller, as a launcher sees them, for a FakeCluster.

Recorded of Trainer v2.3.0 and JobSet v0.12.0 on Kubernetes 1.33: names, labels, conditions and their
words, and what the end of a pod means. The policies are those of the runtime that was sent.
"""

import copy
import random
import string
import uuid
from datetime import UTC, datetime

TRAINJOBS, RUNTIMES = "trainjobs", "trainingruntimes"
GROUP = "trainer.kubeflow.org"
JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
DENIED = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
AWAY = (
    'Internal error occurred: failed calling webhook "validator.trainjob.trainer.kubeflow.org": failed to '
    'call webhook: Post "https://kubeflow-trainer-controller-manager.kubeflow-system.svc:443/validate": '
    'no endpoints available for service "kubeflow-trainer-controller-manager"'
)
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
ENDS = {
    "FailJobSet": (
        "FailJobSetFailurePolicyAction",
        "applying FailJobSet failure policy action (first failed job: {}-node-0)",
    ),
    "used up": (
        "ReachedMaxRestarts",
        "jobset failed due to reaching max number of restarts (first failed job: {}-node-0)",
    ),
}
"""Reason and message of a TrainJob that failed."""


class FakeTrainer:
    """The controllers of TrainJobs in a FakeCluster."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.works = True
        """Whether pods are made."""
        self.away = False
        """Whether the webhook does not answer."""
        self.pause = 0.06
        """Seconds in which there are no pods, between the old ones and the new ones."""
        self.collection_seconds = 0.0
        """How long a runtime stays whose job is gone."""
        self._runs = {}

    def refusal(self, resource, namespace, body):
        """Status and words of the webhook's refusal; nothing if it takes an object."""
        if self.away:
            return 500, AWAY
        if resource == RUNTIMES:
            return None
        spec, name = body["spec"], body["metadata"].get("name", "")
        reference = spec["runtimeRef"]
        if (RUNTIMES, namespace, reference["name"]) not in self.cluster.objects:
            absent = f'TrainingRuntime.trainer.kubeflow.org "{reference["name"]}" not found'
            must = "specified trainingRuntime must be created before the TrainJob is created"
            return 403, f"{DENIED}spec.runtimeRef: Invalid value: {{...}}: {absent}: {must}"
        env = [item["name"] for item in (spec.get("trainer") or {}).get("env") or []]
        if taken := [name for name in env if name in RESERVED]:
            words = f"must not have reserved envs, invalid envs configured: [{' '.join(taken)}]"
            return 403, f"{DENIED}spec.trainer.env: Invalid value: [...]: {words}"
        if len(name) > 63:
            return 422, f'TrainJob.trainer.kubeflow.org "{name}" is invalid: must be at most 63 characters'
        return None

    def create(self, namespace, body):
        """Store a TrainJob and, unless it is suspended, make its pods."""
        job = self.cluster.add(TRAINJOBS, namespace, body)
        if self.works:
            runtime = self.cluster.objects[RUNTIMES, namespace, job["spec"]["runtimeRef"]["name"]]
            self._runs[job["metadata"]["uid"]] = run = _Run(self, job, copy.deepcopy(runtime))
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
        """Let the time of a job be over."""
        self._run(job).deadline()

    def ended(self, pod):
        """A pod has ended."""
        self._act(pod, "ended")

    def removed(self, pod):
        """A pod is gone."""
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
        told = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        status = {"progressPercentage": percent, "metrics": told, "lastUpdatedTime": _now()}
        if seconds is not None:
            status["estimatedRemainingSeconds"] = seconds
        job.setdefault("status", {})["trainerStatus"] = status

    def condition(self, job, kind, reason="", message="", status="True"):
        """Set one condition of a TrainJob."""
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [item for item in conditions if item["type"] != kind]
        conditions.append({"type": kind, "status": status, "reason": reason, "message": message,
                           "lastTransitionTime": _now()})  # fmt: skip


class _Run:
    """What is made of one TrainJob: a JobSet, its Job, and their pods."""

    def __init__(self, trainer, job, runtime):
        self._trainer, self._cluster, self._job = trainer, trainer.cluster, job
        self._name, self._namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        jobset = runtime["spec"]["template"]["spec"]
        self._failures_of_job = jobset.get("failurePolicy") or {}
        self._spec = jobset["replicatedJobs"][0]["template"]["spec"]
        self._template = _merged(self._spec["template"], copy.deepcopy(job["spec"]))
        wanted = job["spec"].get("trainer") or {}
        self._nodes = wanted.get("numNodes") or runtime["spec"]["mlPolicy"]["numNodes"]
        self._jobset_uid = str(uuid.uuid4())
        self._restarts = 0
        self.pods = []
        """Those of the present Job."""
        self._verdict = None
        """What follows when the pods of a Job that has ended are gone."""

    def begin(self):
        """Make the pods, unless the job waits for a queue."""
        if seconds := self._job["spec"].get("activeDeadlineSeconds"):
            self._cluster.later(seconds, self.deadline)
        if len(self._name) > 63 - 6 - len(f"-node-0-{self._nodes - 1}"):
            words = "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"
            self._cluster.event(
                self._name, "TrainJobResourcesCreationFailed", words, "TrainJob", self._namespace
            )
        elif self._suspended:
            self._set("Suspended", "Suspended", "TrainJob is suspended")
        else:
            self._start()

    def _set(self, kind, reason, message, status="True"):
        self._trainer.condition(self._job, kind, reason, message, status)

    def _start(self):
        self._uid = str(uuid.uuid4())
        self._verdict, self._failures, self._done = None, 0, set()
        self.pods = []
        for rank in range(self._nodes):
            self._make(rank)

    def _make(self, rank):
        base = f"{self._name}-node-0-{rank}"
        ours = {
            f"{JOBSET}/jobset-name": self._name, f"{JOBSET}/jobset-uid": self._jobset_uid,
            f"{JOBSET}/replicatedjob-name": "node", f"{JOBSET}/job-index": "0",
            f"{JOBSET}/restart-attempt": str(self._restarts), INDEX: str(rank),
        }  # fmt: skip
        of_job = {"batch.kubernetes.io/job-name": f"{self._name}-node-0", "job-name": f"{self._name}-node-0"}
        meta = self._template["metadata"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": of_job["job-name"], "uid": self._uid}
        body = {
            "metadata": {
                "name": f"{base}-{''.join(random.choices(string.ascii_lowercase + string.digits, k=5))}",
                "labels": {**meta["labels"], **ours, **of_job},
                "annotations": {**meta["annotations"], **ours},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": copy.deepcopy(self._template["spec"]),
        }
        self.pods.append(self._cluster.make_pod(self._namespace, body, base))

    def ended(self, pod):
        """Do what the Job controller does when a pod has ended."""
        if self._verdict:
            self._settle()
            return
        code = _code(pod)
        if code == 0:
            self._done.add(_rank(pod))
            enough = [
                rule["succeededCount"] for rule in (self._spec.get("successPolicy") or {}).get("rules", [])
            ]
            if len(self._done) >= min([*enough, self._nodes]):
                self._end(self._complete)
            return
        self._count(pod, self._action(pod, code))

    def removed(self, pod):
        """Do what the Job controller does when a pod is gone: it is taken for one that failed."""
        if self._verdict:
            self._settle()
        elif pod.body["status"]["phase"] not in ("Succeeded", "Failed"):
            self._count(pod, "Count")

    @property
    def _suspended(self):
        return bool(self._job["spec"].get("suspend"))

    def _action(self, pod, code):
        held = [(item["type"], item["status"]) for item in pod.body["status"].get("conditions", [])]
        for rule in (self._spec.get("podFailurePolicy") or {}).get("rules", []):
            wanted = [(item["type"], item["status"]) for item in rule.get("onPodConditions", [])]
            if set(wanted) & set(held) or code in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
        return "Count"

    def _count(self, pod, action):
        if action == "FailJob":
            return self._end(self._failed, "PodFailurePolicy")
        self._failures += action == "Count"
        if self._failures > self._spec["backoffLimit"]:
            return self._end(self._failed, "BackoffLimitExceeded")
        return self._cluster.later(self._trainer.pause, self._replace, pod)

    def _replace(self, pod):
        """Make one pod anew; the old one stays if it is there still."""
        if not self._verdict and not self._suspended and pod in self.pods:
            self._make(_rank(pod))

    def _end(self, then, *words):
        """End the Job: what runs of it is deleted, and what follows waits for that."""
        self._verdict = (then, *words)
        for pod in self.pods:
            if not pod.ended:
                self._cluster.delete_pod(pod, self._cluster.termination_seconds)
        self._settle()

    def _settle(self):
        if self._verdict and all(pod.ended for pod in self.pods):
            then, *words = self._verdict
            self._verdict = (lambda *_: None,)
            then(*words)

    def _complete(self):
        self._set("Complete", "AllJobsCompleted", "jobset completed successfully")

    def _failed(self, reason):
        """Do what JobSet does when its Job failed."""
        rules = self._failures_of_job.get("rules", [])
        action = next(
            (rule["action"] for rule in rules if reason in rule["onJobFailureReasons"]), "RestartJobSet"
        )
        if action != "FailJobSet" and self._restarts >= self._failures_of_job.get("maxRestarts", 0):
            action = "used up"
        if action in ENDS:
            reason, message = ENDS[action]
            return self._set("Failed", reason, message.format(self._name))
        self._restarts += 1
        self._clear()
        return self._cluster.later(self._trainer.pause, self._start_anew)

    def _start_anew(self):
        if self._there and not self._suspended:
            self._start()

    @property
    def _there(self):
        return self._job["metadata"]["uid"] in self._trainer._runs

    def _clear(self, seconds=0.0):
        for pod in self.pods:
            self._cluster.delete_pod(pod, 0.0 if pod.ended else seconds)

    def over(self):
        """Forget the job, and let its pods go."""
        self._verdict = (lambda *_: None,)
        self._clear(self._cluster.termination_seconds)

    def deadline(self):
        """End the job, for its time is over."""
        ended = [
            item for item in self._job.get("status", {}).get("conditions", []) if item["type"] != "Suspended"
        ]
        if self._there and not ended:
            self._set("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")
            self.over()

    def suspend(self):
        self._set("Suspended", "Suspended", "TrainJob is suspended")
        self.over()

    def resume(self):
        self._set("Suspended", "Resumed", "TrainJob is resumed", status="False")
        self._start()


def _merged(template, spec):
    """A pod's template, with what a TrainJob says instead of the runtime."""
    merged = copy.deepcopy(template)
    meta = merged.setdefault("metadata", {})
    node = next(item for item in merged["spec"]["containers"] if item["name"] == "node")
    trainer = spec.get("trainer") or {}
    for there, here in {"image": "image", "command": "command", "resourcesPerNode": "resources"}.items():
        if there in trainer:
            node[here] = trainer[there]
    if "env" in trainer:
        own = {item["name"] for item in trainer["env"]}
        node["env"] = [*(item for item in node.get("env", []) if item["name"] not in own), *trainer["env"]]
    for patch in spec.get("runtimePatches") or []:
        jobs = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        for change in (job["template"]["spec"]["template"] for job in jobs if job["name"] == "node"):
            for name, words in change.get("metadata", {}).items():
                meta[name] = {**meta.get(name, {}), **words}
            containers = {item["name"]: item for item in change["spec"].pop("containers", [])}
            merged["spec"].update(change["spec"])
            node.update(containers.get("node", {}))
    for name in ("labels", "annotations"):
        meta.setdefault(name, {})
    return merged


def _rank(pod):
    return int(pod.body["metadata"]["labels"][INDEX])


def _code(pod):
    states = pod.body["status"].get("containerStatuses") or [{"state": {}}]
    return states[0]["state"].get("terminated", {}).get("exitCode")


def _now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
