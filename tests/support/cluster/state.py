"""A cluster in memory: objects, their changes, pods that live by a script, and controllers of jobs.

cluster = SimulatedCluster()
cluster.lives["train-worker-0"] = [ends(1), fine]    # Of the first pod of that name, and of those after it.
cluster.lives["train-node-0-0"] = fine               # Of a TrainJob, whose pods' names have a random end.
"""

import copy
import itertools
import random
import threading

from cluster.clock import SimulatedClock
from cluster.controllers import PyTorchJobs, TrainJobs
from cluster.pods import Pod, fine

JOBS, PODS, EVENTS, TRAINJOBS, RUNTIMES = "pytorchjobs", "pods", "events", "trainjobs", "trainingruntimes"


class ClusterState:
    def __init__(self, clock, seed=0):
        self.clock, self.random = clock, random.Random(seed)
        self.news = clock.condition()  # Notified after each change.
        self.lock = threading.RLock()
        self.objects = {}  # Bodies by (resource, namespace, name).
        self.pods = {}  # By uid, also those that are gone.
        self.lives = {}  # Lives of pods by name: one after the other, the last one again and again.
        self.termination_seconds = 0.0  # How long a deleted pod stays.
        self.collection_seconds = 0.0  # How long objects stay whose owner is gone.
        self.changes = []  # What watches report: (ADDED, MODIFIED or DELETED, body, resource).
        self.forgotten = 0  # The version up to which changes are not kept any more.
        self.installed = {JOBS}  # Kinds that the API server knows besides its own.
        self.away = set()  # Kinds of jobs whose controller is down: neither it nor its webhook answers.
        self.asleep = set()  # Kinds of jobs whose controller admits jobs and makes no pods.
        self.denied = set()  # What RBAC forbids: (verb, resource).
        self.controllers = {JOBS: PyTorchJobs(self), TRAINJOBS: TrainJobs(self)}
        self.kueue = None
        self.observer = lambda kind, body, resource: None  # Called with each change.
        self._born = {}
        self._removed = set()  # What is created with such an owner is collected, too.
        self._numbers = itertools.count(1)
        for namespace in ("default", "team", "kubeflow"):
            self.add("namespaces", "", {"metadata": {"name": namespace}})

    def time(self):
        return f"{self.clock.now():%Y-%m-%dT%H:%M:%SZ}"

    def notify(self):
        with self.news:
            self.news.notify_all()

    def later(self, seconds, function, *arguments):
        """Call a function after a while; at once if that is zero."""

        def act():
            self.clock.sleep(seconds)
            with self.lock:
                function(*arguments)

        if seconds:
            self._start(act)
        else:
            function(*arguments)

    def _start(self, work, *arguments):
        """Start a thread that does not end with the process whose request it serves."""
        if isinstance(self.clock, SimulatedClock):
            self.clock.start_in(None, work, *arguments)
        else:
            self.clock.start(work, *arguments)

    def uid(self):
        return f"{self.random.getrandbits(128):032x}"

    def add(self, resource, namespace, body):
        meta = body.setdefault("metadata", {})
        meta |= {"uid": self.uid(), "creationTimestamp": self.time()}
        if namespace:
            meta["namespace"] = namespace
        with self.lock:
            self.objects[resource, namespace, meta["name"]] = body
            if resource == PODS:
                self.pods[meta["uid"]] = Pod(self, body)
            self.changed("ADDED", body, resource)
            for uid in self._removed & {owner["uid"] for owner in meta.get("ownerReferences") or []}:
                self.later(self.collection_seconds, self._collect, uid)
        return body

    def changed(self, kind, body, resource):
        with self.lock:
            body["metadata"]["resourceVersion"] = str(len(self.changes) + 1)
            self.changes.append((kind, copy.deepcopy(body), resource))
            self.observer(kind, body, resource)
        self.notify()

    def remove(self, resource, namespace, name):
        """Delete an object, and what it owns."""
        with self.lock:
            body = self.objects[resource, namespace, name]
            if resource == PODS:
                return self.delete_pod(self.pods[body["metadata"]["uid"]], self.termination_seconds)
            del self.objects[resource, namespace, name]
            self._removed.add(body["metadata"]["uid"])
            self.changed("DELETED", body, resource)
            if resource in self.controllers:
                self.controllers[resource].deleted(body)
            return self.later(self.collection_seconds, self._collect, body["metadata"]["uid"])

    def _collect(self, uid):
        for key, body in list(self.objects.items()):
            owners = [owner["uid"] for owner in body["metadata"].get("ownerReferences") or []]
            if owners == [uid] and key in self.objects:
                self.remove(*key)

    def event(self, name, reason, message, kind="Pod", namespace="default", count=1):
        about = {"kind": kind, "name": name, "namespace": namespace}
        body = {"metadata": {"name": f"{name}.{next(self._numbers)}"}, "involvedObject": about}
        body |= {"reason": reason, "message": message, "type": "Warning", "count": count}
        self.add(EVENTS, namespace, body | {"lastTimestamp": self.time()})

    def pod(self, name, namespace="default"):
        """Return the newest pod of that name, with or without its random end, that still exists; or None."""
        pods = [pod for pod in list(self.pods.values()) if name in (pod.name, pod.base)]
        existing = [pod for pod in pods if self.objects.get((PODS, namespace, pod.name)) is pod.body]
        return existing[-1] if existing else None

    def pods_of(self, label, job):
        """Return the existing pods that a label gives to a job."""
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        bodies = [body for key, body in list(self.objects.items()) if key[:2] == (PODS, namespace)]
        mine = [body for body in bodies if body["metadata"].get("labels", {}).get(label) == name]
        return [self.pods[body["metadata"]["uid"]] for body in mine]

    def job(self, name="train", namespace="default"):
        return self.objects.get((JOBS, namespace, name)) or self.objects.get((TRAINJOBS, namespace, name))

    def delete_job(self, name="train", namespace="default"):
        resource = JOBS if (JOBS, namespace, name) in self.objects else TRAINJOBS
        self.remove(resource, namespace, name)

    def create_job(self, namespace, body):
        with self.lock:
            resource = TRAINJOBS if body.get("kind") == "TrainJob" else JOBS
            self.add(resource, namespace, body)
            if self.kueue:
                self.kueue.adopt(body)
            self.controllers[resource].created(body)
            return body

    def suspend(self, job, value):
        """Suspend or resume a job, as a queue does."""
        with self.lock:
            (job["spec"] if "runtimeRef" in job["spec"] else job["spec"].setdefault("runPolicy", {}))[
                "suspend"
            ] = value
            self.controllers[TRAINJOBS if "runtimeRef" in job["spec"] else JOBS].suspended(job, value)

    def reconcile_owner(self, pod):
        with self.lock:
            for controller in self.controllers.values():
                controller.pod_changed(pod)

    def make_pod(self, namespace, body, base=""):
        """Add a pod and start its life; `base` is its name without the random end."""
        body = self.add(PODS, namespace, body | {"status": {"phase": "Pending"}})
        pod = self.pods[body["metadata"]["uid"]]
        pod.base = base or pod.name
        lives = self.lives.get(pod.base, [fine])
        lives = lives if isinstance(lives, list) else [lives]
        born = self._born[pod.base] = self._born.get(pod.base, 0) + 1
        self._start(pod.live, lives[min(born, len(lives)) - 1])
        return pod

    def delete_pod(self, pod, seconds=0.0):
        """Remove a pod, now or after its grace period."""
        with self.lock:
            if seconds and not pod.ended:
                if not pod.leaving:
                    pod.body["metadata"]["deletionTimestamp"] = self.time()
                    self.changed("MODIFIED", pod.body, PODS)
                    self.later(seconds, self.delete_pod, pod)
                return
            pod.gone = True
            key = (PODS, pod.body["metadata"]["namespace"], pod.name)
            if self.objects.get(key) is pod.body:
                del self.objects[key]
                self.changed("DELETED", pod.body, PODS)
                self.reconcile_owner(pod)
