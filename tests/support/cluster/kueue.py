"""Kueue in a simulated cluster: it makes Workloads of the jobs that name a queue, and a test admits them.

kueue = Kueue(cluster)              # Serves both kinds of jobs.
kueue.set_waiting("train", QUOTA)   # Why it waits.
kueue.admit("train")

The objects are as Kueue v0.19.2 writes them.
"""

GROUP = "kueue.x-k8s.io"
BOTH = ("kubeflow.org/pytorchjob", "trainer.kubeflow.org/trainjob")
KINDS = {"pytorchjobs": ("PyTorchJob", BOTH[0]), "trainjobs": ("TrainJob", BOTH[1])}
QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor gpus, "
    "120m more needed"
)
PREEMPTED = (
    "Preempted to accommodate a workload (UID: c78ca6b2-c422-41ad-b506-40cf4377b5a1, JobUID: "
    "d9b24db8-efd3-4d5b-bbd2-68cb7673a519) due to prioritization in the ClusterQueue; preemptor path: /gpus; "
)


class Kueue:
    def __init__(self, cluster, serves=BOTH, versions=("v1beta2", "v1beta1")):
        self.cluster, self.serves, self.versions = cluster, tuple(serves), versions
        self.labels = True  # Whether Workloads have their job's uid as a label, as well as an owner.
        cluster.kueue = self
        cluster.installed = cluster.installed | {"workloads"}
        pod = {"spec": {"containers": [{"name": "manager", "image": "registry.k8s.io/kueue/kueue:v0.19.2"}]}}
        manager = {"metadata": {"name": "kueue-controller-manager"}, "status": {"readyReplicas": 1}}
        cluster.add("deployments", "kueue-system", manager | {"spec": {"selector": {}, "template": pod}})

    def change(self, resource, body):
        """Do what the webhook does with a new job: suspend it if it names a queue."""
        labels = body["metadata"].get("labels") or {}
        if resource in KINDS and KINDS[resource][1] in self.serves and labels.get(f"{GROUP}/queue-name"):
            (body["spec"] if "runtimeRef" in body["spec"] else body["spec"].setdefault("runPolicy", {}))[
                "suspend"
            ] = True

    def adopt(self, job):
        kind, framework = next(names for names in KINDS.values() if names[0] == job["kind"])
        meta = job["metadata"]
        queue = (meta.get("labels") or {}).get(f"{GROUP}/queue-name")
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
        labels = {f"{GROUP}/job-uid": meta["uid"]} if self.labels else {}
        body = {"metadata": {"name": name, "labels": labels, "ownerReferences": [owner]}, "status": {}}
        body["spec"] = {"active": True, "queueName": queue, "podSets": [], "priority": 0}
        self.cluster.add("workloads", meta["namespace"], body)

    def workload(self, job):
        workloads = [body for key, body in self.cluster.objects.items() if key[0] == "workloads"]
        return next(body for body in workloads if body["metadata"]["ownerReferences"][0]["name"] == job)

    def set_waiting(self, job, message, reason="Pending"):
        self.set_condition(job, "QuotaReserved", "False", reason, message)

    def admit(self, job):
        workload = self.workload(job)
        for item in workload["status"].get("conditions", []).copy():
            if item["type"] in ("Evicted", "Preempted"):
                self.set_condition(
                    job, item["type"], "False", "QuotaReserved", f"Previously: {item['message']}"
                )
        self.set_condition(job, "Admitted", "True", "Admitted", "The workload is admitted")
        self.set_condition(
            job, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue gpus"
        )
        self.cluster.suspend(self.cluster.job(job), False)

    def evict(self, job, reason="Preempted", message=PREEMPTED):
        """Take a job back: its pods are deleted, and it waits in the queue again."""
        self.set_condition(job, "Evicted", "True", reason, message)
        self.set_condition(job, "QuotaReserved", "False", "Pending", message)
        self.set_condition(job, "Admitted", "False", "NoReservation", "The workload has no reservation")
        self.cluster.suspend(self.cluster.job(job), True)

    def set_condition(self, job, kind, status, reason, message):
        workload_status = self.workload(job)["status"]
        rest = [item for item in workload_status.get("conditions", []) if item["type"] != kind]
        new = {"type": kind, "status": status, "reason": reason, "message": message}
        workload_status["conditions"] = [*rest, new | {"lastTransitionTime": self.cluster.time()}]
