"""The labels of kubedet's jobs and pods."""

from components.launchers.spec import JobSpec

LABEL_SPEC = "kubedet/spec-hash"
"""Hash of the specification: tells whether an existing job is the same."""

LABEL_NAME = "app.kubernetes.io/instance"
"""Name of the job, on each of its pods."""

LABEL_MANAGED = "app.kubernetes.io/managed-by"
"""Who created the object; those of others are never touched."""

MANAGED_BY = "kubedet"
"""The value of LABEL_MANAGED."""

LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""Kueue's queue that admits a job."""

RUNAI_SCHEDULER = "runai-scheduler"
"""Scheduler that knows Run:ai's queues."""


def of_pods(job: JobSpec) -> dict[str, str]:
    """Return the labels of every pod of a job."""
    managed = {"app.kubernetes.io/name": "kubedet", LABEL_MANAGED: MANAGED_BY, LABEL_NAME: job.name}
    # Istio looks at the label, older ones at the annotation: a sidecar breaks the rendezvous.
    mesh = {"sidecar.istio.io/inject": "false"}
    return mesh | ({"runai/queue": job.runai_queue} if job.runai_queue else {}) | dict(job.labels) | managed


def of_job(job: JobSpec) -> dict[str, str]:
    """Return the labels of the job itself."""
    queue = {LABEL_QUEUE: job.kueue_queue} if job.kueue_queue else {}
    pods = {key: value for key, value in of_pods(job).items() if key != "sidecar.istio.io/inject"}
    return pods | queue | {LABEL_SPEC: job.fingerprint}
