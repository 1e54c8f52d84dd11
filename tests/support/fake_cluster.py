"""A cluster in memory: objects, controllers of a few rules, and pods that live by a script.

A test gives each pod a life, a function of `FakePod` that runs in a thread of its own:

    def dies(pod):
        pod.run()
        pod.say("error: out of luck")
        pod.exit(1)

    cluster.lives["train-worker-0"] = [dies, fine]   # The first pod of that name, and those after it.
    cluster.lives["train-node-0-0"] = fine           # Of a TrainJob, whose pods' names go on.
"""

import copy
import itertools
import threading
import uuid

from fake_jobset import JOBSET
from fake_pod import FakePod, fine, now
from fake_trainer import RUNTIMES, TRAINJOBS, FakeTrainer

JOBS, PODS, EVENTS = "pytorchjobs", "pods", "events"


class FakeCluster:
    def __init__(self):
        self.objects = {}  # Bodies by (resource, namespace, name).
        self.pods = {}  # FakePod by uid; those that are gone too.
        self.lives = {}  # Lives of pods by name: one after the other, the last again and again.
        self.termination_seconds = 0.0  # How long a deleted pod stays.
        self.installed = {"pytorchjobs"}  # The kinds of objects that the API server knows besides its own.
        self.operator = True  # Whether a Training Operator makes pods.
        self.trainer = FakeTrainer(self)  # The controllers of TrainJobs.
        self.changes = []
        """What watches tell: (ADDED, MODIFIED or DELETED, the body as it was then, its resource)."""
        self.forgotten = 0  # The version up to which changes are not kept any more.
        self.denied = set()  # What RBAC forbids: (verb, resource).
        self._born = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        for namespace in ("default", "team", "kubeflow"):
            self.add("namespaces", "", {"metadata": {"name": namespace}})

    def refusal(self, resource, namespace, body):
        """Status and words with which a controller's webhook refuses an object; nothing if it takes it."""
        if resource in (TRAINJOBS, RUNTIMES):
            return self.trainer.refusal(resource, namespace, body)
        if resource == JOBS and not self.operator:
            return 500, 'Internal error occurred: failed calling webhook "validator": connection refused'
        return None

    def add(self, resource, namespace, body):
        meta = body.setdefault("metadata", {})
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "resourceVersion": "1"}
        if namespace:
            meta["namespace"] = namespace
        self.objects[resource, namespace, meta["name"]] = body
        if resource == PODS:
            self.changed("ADDED", body)
        return body

    def changed(self, kind, body, resource=PODS):
        """Tell those who watch; the number of a change is its object's version."""
        with self._lock:
            body["metadata"]["resourceVersion"] = str(len(self.changes) + 1)
            self.changes.append((kind, copy.deepcopy(body), resource))

    def event(self, name, reason, message, kind="Pod", namespace="default", count=1):
        about = {"kind": kind, "name": name, "namespace": namespace}
        self.add(
            EVENTS,
            namespace,
            {
                "metadata": {"name": f"{name}.{next(self._numbers)}"},
                "involvedObject": about,
                "reason": reason,
                "message": message,
                "type": "Warning",
                "count": count,
                "lastTimestamp": now(),
            },
        )

    def pod(self, name, namespace="default"):
        """The pod of that name, or of that beginning of a made up name, as it is now; or None."""
        pods = [pod for pod in list(self.pods.values()) if name in (pod.name, pod.base)]
        keys = [(pod, (PODS, namespace, pod.name)) for pod in pods]
        return next((pod for pod, key in reversed(keys) if self.objects.get(key) is pod.body), None)

    def job(self, name, namespace="default"):
        return self.objects.get((JOBS, namespace, name)) or self.objects.get((TRAINJOBS, namespace, name))

    def create_job(self, namespace, body):
        """Store a job and, unless it is suspended, make its pods."""
        with self._lock:
            if body.get("kind") == "TrainJob":
                return self.trainer.create(namespace, body)
            self.add(JOBS, namespace, body)
            if not self.operator:
                return body
            self.condition(body, "Created")
            if body["spec"].get("runPolicy", {}).get("suspend"):
                self.condition(body, "Suspended")
            else:
                self.start(body)
            return body

    def start(self, job):
        self.condition(job, "Suspended", status="False")
        job["status"]["startTime"] = now()
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
            for index in range(replica.get("replicas", 1)):
                self._make_pod(job, kind.lower(), index, replica["template"])

    def delete_job(self, namespace, name):
        """Delete a job; its pods follow after `termination_seconds`."""
        with self._lock:
            if (TRAINJOBS, namespace, name) in self.objects:
                return self.trainer.delete(namespace, name)
            self.objects.pop((JOBS, namespace, name))
            for pod in self._pods_of(namespace, name):
                self.delete_pod(pod, self.termination_seconds)
            return None

    def resume(self, job):
        """Admit a job, as its queue does."""
        if job.get("kind") == "TrainJob":
            return self.trainer.resume(job)
        job["spec"].setdefault("runPolicy", {})["suspend"] = False
        return self.start(job)

    def suspend(self, job):
        """Take a job back, as its queue does."""
        if job.get("kind") == "TrainJob":
            return self.trainer.suspend(job)
        self.condition(job, "Suspended")
        for pod in self._pods_of(job["metadata"]["namespace"], job["metadata"]["name"]):
            self.delete_pod(pod)

    def later(self, seconds, function, *arguments):
        def act():
            with self._lock:
                function(*arguments)

        if not seconds:
            return act()
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        return timer.start()

    def delete_pod(self, pod, seconds=0.0):
        """Let a pod go, now or after a while."""
        pod.body["metadata"]["deletionTimestamp"] = now()
        if seconds:
            self.changed("MODIFIED", pod.body)
            self.later(seconds, self.delete_pod, pod)
            return
        pod.deleted.set()
        key = (PODS, pod.body["metadata"]["namespace"], pod.name)
        with self._lock:
            if self.objects.get(key) is not pod.body:
                return
            del self.objects[key]
            self.changed("DELETED", pod.body)
            self.trainer.removed(pod)

    def condition(self, job, kind, status="True", message=""):
        """Set one condition of a job, at the end of the list as the operator does."""
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        old = [item for item in conditions if item["type"] != kind]
        if status == "True" and kind in ("Running", "Restarting", "Succeeded", "Failed"):
            for item in old:
                if item["type"] in ("Running", "Restarting"):
                    item["status"] = "False"
        new = {"type": kind, "status": status, "reason": f"PyTorchJob{kind}", "message": message,
               "lastTransitionTime": now(), "lastUpdateTime": now()}  # fmt: skip
        job["status"]["conditions"] = [*old, new]

    def running(self, pod):
        """What the operator does when a pod runs."""
        job = self.job(pod.body["metadata"]["labels"].get("training.kubeflow.org/job-name"))
        if job is not None:
            self.condition(job, "Running")

    def reconcile(self, pod):
        """What the operator does when a pod has ended."""
        with self._lock:
            meta = pod.body["metadata"]
            labels, namespace = meta["labels"], meta["namespace"]
            if f"{JOBSET}/jobset-name" in labels:
                return self.trainer.ended(pod)
            job = self.job(labels["training.kubeflow.org/job-name"], namespace)
            if job is None or not self.operator:
                return None
            states = pod.body["status"].get("containerStatuses", [{"state": {"terminated": {}}}])
            code = states[0]["state"]["terminated"].get("exitCode", 0xBEEF)
            kind = labels["training.kubeflow.org/replica-type"]
            replicas = job["spec"]["pytorchReplicaSpecs"]
            replica = replicas[kind.capitalize()]
            if code == 0:  # Of ours rank 0 ends first.
                if labels["training.kubeflow.org/replica-index"] == "0":
                    self._finish(job, "Succeeded", "")
            elif replica.get("restartPolicy") == "ExitCode" and code >= 128:
                message = f"{kind} replica(s) failed"
                ended = f"Pod: {namespace}.{meta['name']} exited with code {code}"
                self.event(job["metadata"]["name"], "ExitedWithCode", ended, "PyTorchJob", namespace)
                self.condition(job, "Restarting", message=f"{meta['name']} is restarting because {message}")
                self.delete_pod(pod)
                index = int(labels["training.kubeflow.org/replica-index"])
                self._make_pod(job, kind, index, replica["template"])
            else:
                self._finish(job, "Failed", f"PyTorchJob failed because 1 {kind} replica(s) failed.")
            return None

    def _finish(self, job, kind, message):
        meta = job["metadata"]
        self.condition(job, kind, message=message)
        if job["spec"].get("runPolicy", {}).get("cleanPodPolicy") != "None":
            for pod in self._pods_of(meta["namespace"], meta["name"]):
                if pod.body["status"]["phase"] in ("Running", "Pending"):
                    self.delete_pod(pod, self.termination_seconds)

    def _pods_of(self, namespace, job):
        bodies = [body for key, body in list(self.objects.items()) if key[:2] == (PODS, namespace)]
        label = "training.kubeflow.org/job-name"
        mine = [body for body in bodies if body["metadata"].get("labels", {}).get(label) == job]
        return [self.pods[body["metadata"]["uid"]] for body in mine]

    def _make_pod(self, job, kind, index, template):
        meta = job["metadata"]
        name = f"{meta['name']}-{kind}-{index}"
        labels = {
            **template.get("metadata", {}).get("labels", {}),
            "training.kubeflow.org/job-name": meta["name"],
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-type": kind,
            "training.kubeflow.org/replica-index": str(index),
        }
        body = {"metadata": {"name": name, "labels": labels}, "spec": dict(template["spec"])}
        self.make_pod(meta["namespace"], body)

    def make_pod(self, namespace, body, base=""):
        """Put a pod there and let it live; `base` is its name, where that goes on with a made up word."""
        body = self.add(PODS, namespace, body | {"status": {"phase": "Pending"}})
        pod = FakePod(self, body, base)
        self.pods[pod.uid] = pod
        lives = self.lives.get(pod.base, [fine])
        lives = lives if isinstance(lives, list) else [lives]
        life = lives[min(self._born.get(pod.base, 0), len(lives) - 1)]
        self._born[pod.base] = self._born.get(pod.base, 0) + 1
        threading.Thread(target=pod.live, args=[life], daemon=True).start()
        return pod


def gone(cluster, name="train"):
    return cluster.job(name) is None
