"""What JobSet and the Job controller make of one TrainJob in a FakeCluster; see fake_trainer.py."""

import copy
import random
import string
import uuid

JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"
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


class JobSetRun:
    def __init__(self, trainer, job, runtime):
        self._trainer, self._cluster, self._job = trainer, trainer.cluster, job
        self._name, self._namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        jobset = runtime["spec"]["template"]["spec"]
        self._failures_of_job = jobset.get("failurePolicy") or {}
        self._spec = jobset["replicatedJobs"][0]["template"]["spec"]
        self._template = _merged(self._spec["template"], copy.deepcopy(job["spec"]))
        trainer_spec = job["spec"].get("trainer") or {}
        self._nodes = trainer_spec.get("numNodes") or runtime["spec"]["mlPolicy"]["numNodes"]
        self._jobset_uid = str(uuid.uuid4())
        self._restarts = 0
        self.pods = []  # Those of the present Job.
        self._verdict = None  # What follows when the pods of a Job that has ended are gone.

    def begin(self):
        """Make the pods, unless the job waits for a queue."""
        if seconds := self._job["spec"].get("activeDeadlineSeconds"):
            self._cluster.later(seconds, self.deadline)
        if self._suspended:
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
            f"{JOBSET}/jobset-name": self._name,
            f"{JOBSET}/jobset-uid": self._jobset_uid,
            f"{JOBSET}/replicatedjob-name": "node",
            f"{JOBSET}/job-index": "0",
            f"{JOBSET}/restart-attempt": str(self._restarts),
            INDEX: str(rank),
        }
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
            conditions = [(item["type"], item["status"]) for item in rule.get("onPodConditions", [])]
            if set(conditions) & set(held) or code in rule.get("onExitCodes", {}).get("values", []):
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
    for field, container_field in {
        "image": "image",
        "command": "command",
        "resourcesPerNode": "resources",
    }.items():
        if field in trainer:
            node[container_field] = trainer[field]
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
