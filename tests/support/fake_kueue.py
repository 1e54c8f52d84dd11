"""Kueue at a fake API server: it makes Workloads of the jobs that name a queue, and lets them go when told.

def test_something(fake_cluster):
    kueue = give_kueue(fake_cluster)       # Serves both kinds of jobs; the queue `gpus` is there.
    kueue.waits("train", QUOTA)            # Says why; without it nobody has looked at the job yet.
    kueue.admit("train")

The objects are as Kueue v0.19.2 writes them.
"""

import re

from fake_pod import now

GROUP, VISIBILITY = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"
BOTH = ("kubeflow.org/pytorchjob", "trainer.kubeflow.org/trainjob")
PLURALS = {"pytorchjobs": ("PyTorchJob", BOTH[0]), "trainjobs": ("TrainJob", BOTH[1])}
PATH = re.compile(
    rf"/apis/(?P<group>{GROUP}|{VISIBILITY})/(?P<version>v1beta\d)/namespaces/(?P<space>[^/]+)"
    r"/(?P<resource>workloads|localqueues)(?:/(?P<name>[^/]+)(?P<sub>/pendingworkloads)?)?"
)
QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor gpus, "
    "120m more needed"
)
PREEMPTED = (
    "Preempted to accommodate a workload (UID: c78ca6b2-c422-41ad-b506-40cf4377b5a1, JobUID: "
    "d9b24db8-efd3-4d5b-bbd2-68cb7673a519) due to prioritization in the ClusterQueue; preemptor path: /gpus; "
)


def give_kueue(cluster, serves=BOTH, versions=("v1beta2", "v1beta1")):
    """Let a FakeApi have Kueue; returns it."""
    kueue = FakeKueue(cluster, tuple(serves), versions)
    create = cluster.create_job

    def create_and_adopt(namespace, body):
        job = create(namespace, body)
        kueue.adopt(job)
        return job

    cluster.create_job = create_and_adopt
    server = cluster._server
    server.RequestHandlerClass = type("Handler", (_Kueue, server.RequestHandlerClass), {"kueue": kueue})
    pod = {"spec": {"containers": [{"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]}}
    cluster.add(
        "deployments",
        "kueue-system",
        {
            "metadata": {"name": "kueue-controller-manager"},
            "status": {"readyReplicas": 1},
            "spec": {"selector": {}, "template": pod},
        },
    )
    kueue.queue("gpus")
    return kueue


class FakeKueue:
    """The queues and Workloads, and what a test does with them."""

    def __init__(self, cluster, serves, versions):
        self.cluster, self.serves, self.versions = cluster, serves, versions
        self.labels = True  # Whether Workloads carry their job's uid as a label, as well as an owner.
        self._pending = []

    def queue(self, name):
        condition = {"type": "Active", "status": "True", "message": "Can submit new workloads to localQueue",
                     "reason": "Ready"}  # fmt: skip
        self.cluster.add(
            "localqueues",
            "default",
            {
                "metadata": {"name": name},
                "spec": {"clusterQueue": "gpus-of-all", "stopPolicy": "None"},
                "status": {"conditions": [condition], "pendingWorkloads": 2, "admittedWorkloads": 1},
            },
        )

    def adopt(self, job):
        kind, framework = next(names for names in PLURALS.values() if names[0] == job["kind"])
        meta = job["metadata"]
        queue = (meta.get("labels") or {}).get("kueue.x-k8s.io/queue-name")
        if not queue or framework not in self.serves:
            return
        name = f"{kind.lower()}-{meta['name']}-{meta['uid'][:5]}"
        owner = {
            "apiVersion": "v1",
            "kind": kind,
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        labels = {"kueue.x-k8s.io/job-uid": meta["uid"]} if self.labels else {}
        self.cluster.add(
            "workloads",
            meta["namespace"],
            {
                "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
                "spec": {"active": True, "queueName": queue, "podSets": [], "priority": 0},
                "status": {},
            },
        )
        self._pending.append(name)

    def workload(self, job):
        return next(
            body
            for (resource, _, _), body in self.cluster.objects.items()
            if resource == "workloads" and body["metadata"]["ownerReferences"][0]["name"] == job
        )

    def ahead(self, *jobs):
        self._pending[:0] = jobs

    def leave(self, job):
        self._pending.remove(job)

    def waits(self, job, message, reason="Pending"):
        self._condition(job, "QuotaReserved", "False", reason, message)

    def admit(self, job):
        name = self.workload(job)["metadata"]["name"]
        held = self.workload(job)["status"].get("conditions", [])
        for item in [item for item in held if item["type"] in ("Evicted", "Preempted")]:
            self._condition(job, item["type"], "False", "QuotaReserved", f"Previously: {item['message']}")
        self._condition(job, "Admitted", "True", "Admitted", "The workload is admitted")
        self._condition(job, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue gpus")
        self._pending = [other for other in self._pending if other != name]
        with self.cluster._lock:  # No pod ends before its controller knows it.
            self.cluster.resume(self._job(job))

    def evict(self, job, reason="Preempted", message=PREEMPTED):
        """Take a job back: its pods are deleted, and it waits in the queue again."""
        self._pending.append(self.workload(job)["metadata"]["name"])
        self._condition(job, "Evicted", "True", reason, message)
        self._condition(job, "QuotaReserved", "False", "Pending", message)
        self._condition(job, "Admitted", "False", "NoReservation", "The workload has no reservation")
        with self.cluster._lock:
            self._suspend(self._job(job), True)
            self.cluster.suspend(self._job(job))

    def _job(self, name):
        jobs = (self.cluster.objects.get((plural, "default", name)) for plural in PLURALS)
        return next(filter(None, jobs))

    def _suspend(self, job, value):
        spec = job["spec"]
        (spec if "runtimeRef" in spec else spec.setdefault("runPolicy", {}))["suspend"] = value

    def _condition(self, job, kind, status, reason, message):
        workload_status = self.workload(job)["status"]
        others = [item for item in workload_status.get("conditions", []) if item["type"] != kind]
        new = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": now(),
        }
        workload_status["conditions"] = [*others, new]

    def places(self, queue):
        """What the visibility API says of a queue."""
        items = [
            {
                "metadata": {"name": name},
                "localQueueName": queue,
                "priority": 0,
                "positionInClusterQueue": index,
                "positionInLocalQueue": index,
            }
            for index, name in enumerate(self._pending)
        ]
        return {"kind": "PendingWorkloadsSummary", "metadata": {}, "items": items}


class _Kueue:
    """What a handler of the fake API server does where Kueue is."""

    def _answer(self, verb, body, fault):
        match = PATH.fullmatch(self.path.partition("?")[0])
        if match is None:
            return super()._answer(verb, body, fault)
        if match["version"] not in self.kueue.versions:
            return self._send(404, b"404 page not found\n", "text/plain")
        verb = "list" if verb == "get" and not match["name"] else verb
        what = match["resource"] + (match["sub"] or "")
        if (verb, what) in self.cluster.denied:
            return self._error(403, f'{what} is forbidden: User "me" cannot {verb} resource "{what}"')
        if match["sub"]:
            self.cluster.asked.add((verb, what))
            if ("localqueues", match["space"], match["name"]) not in self.cluster.objects:
                return self._error(404, f'localqueue "{match["name"]}" not found', name=match["name"])
            return self._json(self.kueue.places(match["name"]))
        self.path = self.path.replace(f"/{match['version']}/", "/v1/", 1)
        self.cluster.installed |= {"workloads"}
        return super()._answer(verb if match["name"] else "get", body, fault)

    def _create(self, resource, namespace, body):
        self._webhook(resource, body)
        return super()._create(resource, namespace, body)

    def _dry_run(self, resource, namespace, body):
        self._webhook(resource, body)
        return super()._dry_run(resource, namespace, body)

    def _webhook(self, resource, body):
        labels = body["metadata"].get("labels") or {}
        if (
            resource in PLURALS
            and PLURALS[resource][1] in self.kueue.serves
            and labels.get(f"{GROUP}/queue-name")
        ):
            self.kueue._suspend(body, True)
