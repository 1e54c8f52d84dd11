"""What the Training Operator (v1.9), Kubeflow Trainer (v2.3) with JobSet (v0.12) and the Job controller do.

Names, labels, conditions, messages and the meaning of a pod's end were recorded on Kubernetes 1.33.
"""

import copy
import string

JOB_NAME, INDEX = "training.kubeflow.org/job-name", "training.kubeflow.org/replica-index"
REPLICA = "training.kubeflow.org/replica-type"
JOBSET = "jobset.sigs.k8s.io"
COMPLETION = "batch.kubernetes.io/job-completion-index"
DENIED = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '
UNREACHABLE = 'Internal error occurred: failed calling webhook "{}": {}'
NO_EXIT_CODE = 0xBEEF  # The operator's word for a pod that ended without one.


def set_condition(cluster, job, kind, status="True", reason="", message=""):
    """Set one condition of a job, at the end of the list."""
    conditions = job.setdefault("status", {}).setdefault("conditions", [])
    conditions[:] = [item for item in conditions if item["type"] != kind]
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    conditions.append(new | {"lastTransitionTime": cluster.time(), "lastUpdateTime": cluster.time()})
    cluster.notify()


def held(job):
    return {item["type"] for item in job.get("status", {}).get("conditions", []) if item["status"] == "True"}


class PyTorchJobs:
    resource = "pytorchjobs"

    def __init__(self, cluster):
        self.cluster = cluster

    def refusal(self, namespace, body):
        """Return status and message with which the webhook refuses an object; None if it admits it."""
        if self.resource in self.cluster.away:
            return 500, UNREACHABLE.format("validator", "connection refused")
        return None

    def created(self, job):
        if not self._is_up():
            return
        set_condition(self.cluster, job, "Created", reason="PyTorchJobCreated")
        self.reconcile(job)

    def deleted(self, job):  # The garbage collector does it.
        for pod in self._pods(job):
            self.cluster.delete_pod(pod, self.cluster.termination_seconds)

    def suspended(self, job, value):
        self.reconcile(job)

    def pod_changed(self, pod):
        labels, namespace = pod.body["metadata"].get("labels") or {}, pod.body["metadata"]["namespace"]
        if job := self.cluster.objects.get((self.resource, namespace, labels.get(JOB_NAME))):
            self.reconcile(job)

    def returned(self):
        """Do what is due after the operator was away."""
        for (resource, *_), job in list(self.cluster.objects.items()):
            if resource == self.resource:
                self.reconcile(job)

    def reconcile(self, job):
        if not self._is_up() or held(job) & {"Succeeded", "Failed"}:
            return
        pods = self._pods(job)
        if job["spec"].get("runPolicy", {}).get("suspend"):
            self._set(job, "Suspended")
            for pod in pods:
                self.cluster.delete_pod(pod, self.cluster.termination_seconds)
            return
        set_condition(self.cluster, job, "Suspended", "False")
        names = {pod.name for pod in pods}
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            for index in range(replica.get("replicas", 1)):
                if f"{job['metadata']['name']}-{kind.lower()}-{index}" not in names:
                    self.make_pod(job, kind.lower(), index, replica["template"])
        for pod in pods:
            if pod.body["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]:
                self._judge(job, pod)
        if any(pod.phase == "Running" for pod in pods) and not held(job) & {"Succeeded", "Failed", "Running"}:
            self._set(job, "Running")

    def _judge(self, job, pod):
        if held(job) & {"Succeeded", "Failed"} or pod.gone or not pod.ended:
            return
        labels = pod.body["metadata"]["labels"]
        code = NO_EXIT_CODE if pod.exit_code is None else pod.exit_code
        policy = job["spec"]["pytorchReplicaSpecs"][labels[REPLICA].capitalize()].get("restartPolicy")
        if pod.phase == "Succeeded":
            if labels[INDEX] == "0":
                self._finish(job, "Succeeded", "")
        elif policy == "ExitCode" and code >= 128:
            message = f"Pod: {pod.body['metadata']['namespace']}.{pod.name} exited with code {code}"
            self.cluster.event(job["metadata"]["name"], "ExitedWithCode", message, "PyTorchJob")
            self._set(job, "Restarting", f"{pod.name} is restarting")
            self.cluster.delete_pod(pod)
        else:
            kind = labels[REPLICA]
            self._finish(job, "Failed", f"PyTorchJob failed because 1 {kind} replica(s) failed.")

    def _set(self, job, kind, message=""):
        for item in job["status"].get("conditions", []) if kind != "Suspended" else []:
            if item["type"] in ("Running", "Restarting"):
                item["status"] = "False"
        set_condition(self.cluster, job, kind, reason=f"PyTorchJob{kind}", message=message)

    def _finish(self, job, kind, message):
        self._set(job, kind, message)
        for pod in self._pods(job):
            if pod.phase in ("Running", "Pending"):
                self.cluster.delete_pod(pod, self.cluster.termination_seconds)

    def _is_up(self):
        return self.resource not in self.cluster.away | self.cluster.asleep

    def _pods(self, job):
        return self.cluster.pods_of(JOB_NAME, job)

    def make_pod(self, job, kind, index, template):
        name = job["metadata"]["name"]
        labels = {
            **template.get("metadata", {}).get("labels", {}),
            JOB_NAME: name,
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            REPLICA: kind,
            INDEX: str(index),
        }
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": name}
        owner |= {"uid": job["metadata"]["uid"], "controller": True}
        meta = {"name": f"{name}-{kind}-{index}", "labels": labels, "ownerReferences": [owner]}
        self.cluster.make_pod(
            job["metadata"]["namespace"], {"metadata": meta, "spec": dict(template["spec"])}
        )


class TrainJobs:
    resource = "trainjobs"
    pause = 0.06  # Seconds between the old pods of a restart and the new ones.

    def __init__(self, cluster):
        self.cluster = cluster
        self._runs = {}  # By uid.

    def refusal(self, namespace, body):
        if self.resource in self.cluster.away:
            service = "kubeflow-trainer-controller-manager"
            reason = f'no endpoints available for service "{service}"'
            message = (
                f'failed to call webhook: Post "https://{service}.kubeflow-system.svc:443/validate": {reason}'
            )
            return 500, UNREACHABLE.format("validator.trainjob.trainer.kubeflow.org", message)
        name = body["spec"].get("runtimeRef", {}).get("name")
        if body["kind"] == "TrainJob" and ("trainingruntimes", namespace, name) not in self.cluster.objects:
            absent = f'TrainingRuntime.trainer.kubeflow.org "{name}" not found'
            must = "specified trainingRuntime must be created before the TrainJob is created"
            return 403, f"{DENIED}spec.runtimeRef: Invalid value: {{...}}: {absent}: {must}"
        return None

    def created(self, job):
        is_up = self.resource not in self.cluster.away | self.cluster.asleep
        if is_up and not self.exists(job):
            name = job["spec"]["runtimeRef"]["name"]
            runtime = self.cluster.objects["trainingruntimes", job["metadata"]["namespace"], name]
            run = self._runs[job["metadata"]["uid"]] = _JobSet(self, job, copy.deepcopy(runtime))
            run.begin()

    def deleted(self, job):
        if run := self._runs.pop(job["metadata"]["uid"], None):
            run.end()

    def suspended(self, job, value):
        run = self._runs[job["metadata"]["uid"]]
        (run.suspend if value else run.resume)()

    def exceed_deadline(self, job):
        self._runs[job["metadata"]["uid"]].fail_late()

    def pod_changed(self, pod):
        if self.resource in self.cluster.away:
            return
        for run in list(self._runs.values()):
            if pod in run.pods:
                run.pod_changed(pod)

    def returned(self):
        for (resource, *_), job in list(self.cluster.objects.items()):
            if resource == self.resource:
                self.created(job)
        for run in list(self._runs.values()):
            for pod in list(run.pods):
                run.pod_changed(pod)

    def exists(self, job):
        return job["metadata"]["uid"] in self._runs


class _JobSet:
    """The JobSet and the Job of a TrainJob, by the policies of its runtime."""

    def __init__(self, trainer, job, runtime):
        self._trainer, self._cluster, self._job = trainer, trainer.cluster, job
        self._name, self._namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        jobset = runtime["spec"]["template"]["spec"]
        self._failure_policy = jobset.get("failurePolicy") or {}
        self._spec = jobset["replicatedJobs"][0]["template"]["spec"]
        self._template = _merge(self._spec["template"], copy.deepcopy(job["spec"]))
        self._nodes = (job["spec"].get("trainer") or {}).get("numNodes") or runtime["spec"]["mlPolicy"][
            "numNodes"
        ]
        self._uid = self._cluster.uid()
        self._restarts = 0
        self.pods = []  # Of the present Job, also those that ended.
        self._judged = set()  # Uids of pods whose end was counted.
        self._verdict = None  # What follows when the pods of a Job that has ended are gone.

    def begin(self):
        if seconds := self._job["spec"].get("activeDeadlineSeconds"):
            self._cluster.later(seconds, self.fail_late)
        if self._is_suspended():
            self._set("Suspended", "Suspended", "TrainJob is suspended")
        else:
            self._start()

    def _is_suspended(self):
        return bool(self._job["spec"].get("suspend"))

    def _set(self, kind, reason, message, status="True"):
        set_condition(self._cluster, self._job, kind, status, reason, message)

    def _start(self):
        if self._trainer.exists(self._job) and not self._is_suspended() and not held(self._job) & {"Failed"}:
            self._verdict, self._failures, self._done, self.pods = None, 0, set(), []
            for rank in range(self._nodes):
                self._make(rank)

    def _make(self, rank):
        name = f"{self._name}-node-0"
        ours = {
            f"{JOBSET}/jobset-name": self._name,
            f"{JOBSET}/jobset-uid": self._uid,
            f"{JOBSET}/replicatedjob-name": "node",
            f"{JOBSET}/job-index": "0",
            f"{JOBSET}/restart-attempt": str(self._restarts),
            COMPLETION: str(rank),
        }
        meta = self._template["metadata"]
        end = "".join(self._cluster.random.choices(string.ascii_lowercase + string.digits, k=5))
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": self._uid, "controller": True}
        metadata = {
            "name": f"{name}-{rank}-{end}",
            "labels": {**meta["labels"], **ours, "batch.kubernetes.io/job-name": name, "job-name": name},
            "annotations": {**meta["annotations"], **ours},
            "ownerReferences": [owner],
        }
        body = {"metadata": metadata, "spec": copy.deepcopy(self._template["spec"])}
        self.pods.append(self._cluster.make_pod(self._namespace, body, f"{name}-{rank}"))

    def pod_changed(self, pod):
        if self._verdict:
            self._settle()
        elif pod.ended and pod.uid not in self._judged:
            self._judged.add(pod.uid)
            if pod.phase == "Succeeded":
                self._done.add(_rank(pod))
                rules = (self._spec.get("successPolicy") or {}).get("rules", [])
                if len(self._done) >= min([*(rule["succeededCount"] for rule in rules), self._nodes]):
                    self._finish_job(self._complete)
            else:  # A pod that was removed counts as failed.
                self._count(pod, self._action(pod) if pod.phase == "Failed" else "Count")

    def _action(self, pod):
        present = {(item["type"], item["status"]) for item in pod.body["status"].get("conditions", [])}
        for rule in (self._spec.get("podFailurePolicy") or {}).get("rules", []):
            conditions = {(item["type"], item["status"]) for item in rule.get("onPodConditions", [])}
            if conditions & present or pod.exit_code in rule.get("onExitCodes", {}).get("values", []):
                return rule["action"]
        return "Count"

    def _count(self, pod, action):
        if action == "FailJob":
            return self._finish_job(self._failed, "PodFailurePolicy")
        self._failures += action == "Count"
        if self._failures > self._spec["backoffLimit"]:
            return self._finish_job(self._failed, "BackoffLimitExceeded")
        return self._cluster.later(self._trainer.pause, self._replace, pod)

    def _replace(self, pod):
        if (
            not self._verdict
            and not self._is_suspended()
            and pod in self.pods
            and self._trainer.exists(self._job)
        ):
            self._make(_rank(pod))

    def _finish_job(self, then, *words):
        """End the Job: its running pods are deleted, and what follows waits for that."""
        self._verdict = (then, *words)
        for pod in self.pods:
            if not pod.ended:
                self._cluster.delete_pod(pod, self._cluster.termination_seconds)
        self._settle()

    def _settle(self):
        if self._verdict and all(pod.ended for pod in self.pods):
            (then, *words), self._verdict = self._verdict, (lambda *_: None,)
            then(*words)

    def _complete(self):
        self._set("Complete", "AllJobsCompleted", "jobset completed successfully")

    def _failed(self, reason):
        rules = self._failure_policy.get("rules", [])
        fails = any(reason in rule["onJobFailureReasons"] for rule in rules if rule["action"] == "FailJobSet")
        first = f"(first failed job: {self._name}-node-0)"
        if fails:
            message = f"applying FailJobSet failure policy action {first}"
            self._set("Failed", "FailJobSetFailurePolicyAction", message)
        elif self._restarts >= self._failure_policy.get("maxRestarts", 0):
            message = f"jobset failed due to reaching max number of restarts {first}"
            self._set("Failed", "ReachedMaxRestarts", message)
        else:
            self._restarts += 1
            self._clear(0.0)
            self._cluster.later(self._trainer.pause, self._start)

    def _clear(self, seconds):
        for pod in self.pods:
            self._cluster.delete_pod(pod, 0.0 if pod.ended else seconds)

    def end(self):
        self._verdict = (lambda *_: None,)
        self._clear(self._cluster.termination_seconds)

    def fail_late(self):
        if self._trainer.exists(self._job) and not held(self._job) & {"Failed", "Complete"}:
            self._set("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")
            self.end()

    def suspend(self):
        self._set("Suspended", "Suspended", "TrainJob is suspended")
        self.end()

    def resume(self):
        self._set("Suspended", "Resumed", "TrainJob is resumed", "False")
        self._start()


def _merge(template, spec):
    """Return a pod template with what a TrainJob sets instead of the runtime."""
    merged = copy.deepcopy(template)
    meta = merged.setdefault("metadata", {})
    node = next(item for item in merged["spec"]["containers"] if item["name"] == "node")
    trainer = spec.get("trainer") or {}
    fields = {"image": "image", "command": "command", "resourcesPerNode": "resources"}
    node |= {name: trainer[field] for field, name in fields.items() if field in trainer}
    if "env" in trainer:
        own = {item["name"] for item in trainer["env"]}
        node["env"] = [*(item for item in node.get("env", []) if item["name"] not in own), *trainer["env"]]
    for patch in spec.get("runtimePatches") or []:
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            change = job["template"]["spec"]["template"]
            for name, words in change.get("metadata", {}).items():
                meta[name] = {**meta.get(name, {}), **words}
            containers = {item["name"]: item for item in change["spec"].pop("containers", [])}
            merged["spec"].update(change["spec"])
            node.update(containers.get("node", {}))
    return merged | {"metadata": {"labels": {}, "annotations": {}} | meta}


def _rank(pod):
    return int(pod.body["metadata"]["labels"][COMPLETION])
