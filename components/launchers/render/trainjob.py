"""A job as a TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1, release 2.3).

A TrainJob refers to a TrainingRuntime, a template, and says what differs from it. Ours (SHARED)
has what every job of kubedet wants; a job that wants more than a TrainJob can say (a priority
class, a scheduler, how often it may be restarted, ...) brings a runtime of its own, which belongs
to it. Source: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1 and pkg/runtime/framework;
kubernetes-sigs/jobset v0.12, failure policies; Kubernetes, "Pod failure policy".
"""

from typing import Any

from components.launchers.render import indexed_job, labels, pod
from components.launchers.spec import JobSpec

GROUP = "trainer.kubeflow.org"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "TrainJob"
RUNTIME = "TrainingRuntime"
SHARED = "kubedet"
"""Name of the runtime that deploy/ puts into a namespace."""
ELASTIC = "kubedet/elastic"
"""Annotation of an elastic job: its fewest and most nodes, MIN:MAX."""
NODE = "node"
"""Name of the replicated job and of its container: the controller asks for this one."""

_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_MANAGER = "kubedet.dev/launcher"
_RESTARTS = 10
"""Restarts for each one that `backoff` allows: the launcher forgives those that a checkpoint followed."""

_OF_POD = (
    "serviceAccountName", "volumes", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations",
    "terminationGracePeriodSeconds",
)  # fmt: skip
"""Fields of a pod that a TrainJob can patch."""
_OF_CONTAINER = ("volumeMounts", "securityContext")
_OF_TRAINER = {"image": "image", "command": "command", "env": "env", "resources": "resourcesPerNode"}
"""What it says of the container: names there and in `spec.trainer`."""
_FIXED = {"automountServiceAccountToken": False, "enableServiceLinks": False}
"""Fields of all pods of kubedet, set by SHARED."""


def manifests(job: JobSpec, *, shared: bool = True) -> list[dict[str, Any]]:
    """Return the TrainJob, behind a runtime of its own where it needs one, as they stand in YAML.

    Args:
        job: the job.
        shared: whether the namespace has the runtime SHARED.
    """
    if shared and fits_shared(job):
        return [_with_patches(job)]
    metadata = {**_metadata(job), "name": f"{job.name}-{job.fingerprint[:8]}"}
    body = {"runtimeRef": _reference(metadata["name"]), "trainer": _numbers(job)}
    return [_runtime(metadata, job, _template(job)), _trainjob(job, body)]


def shared_runtime() -> dict[str, Any]:
    """Return the runtime SHARED, as it stands in YAML."""
    job = JobSpec(command=("true",))
    runtime_labels = {"app.kubernetes.io/name": "kubedet", labels.LABEL_MANAGED: labels.MANAGED_BY}
    spec = {"restartPolicy": "Never", **_FIXED, "containers": [{"name": NODE}]}
    # Without any metadata the controller fails, for a moment, at jobs that Kueue has evicted.
    template = {"metadata": {"labels": runtime_labels}, "spec": spec}
    return _runtime({"name": SHARED, "labels": runtime_labels}, job, template)


def fits_shared(job: JobSpec) -> bool:
    """Whether the runtime SHARED fits a job: a TrainJob has fields for all that it asks for."""
    default = JobSpec(command=("true",))
    if job.elastic or (job.restart_policy, job.backoff) != (default.restart_policy, default.backoff):
        return False
    spec = _template(job)["spec"]
    container = spec["containers"][0]
    supported = {*_OF_POD, *_FIXED, "restartPolicy", "containers"}
    return set(spec) <= supported and set(container) <= {"name", *_OF_CONTAINER, *_OF_TRAINER}


def left_out(job: JobSpec) -> list[str]:
    """Return the fields of a job that a TrainJob does not have."""
    default = JobSpec(command=("true",))
    return [name for name in ("clean_pods", "ttl") if getattr(job, name) != getattr(default, name)]


def _metadata(job: JobSpec) -> dict[str, Any]:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **namespace, "labels": labels.of_job(job)}


def _reference(name: str) -> dict[str, str]:
    return {"apiGroup": GROUP, "kind": RUNTIME, "name": name}


def _numbers(job: JobSpec) -> dict[str, Any]:
    return {"numNodes": job.nodes, "numProcPerNode": job.processes}


def _trainjob(job: JobSpec, spec: dict[str, Any]) -> dict[str, Any]:
    if job.suspend or job.kueue_queue:
        spec["suspend"] = True  # Kueue starts what it admits.
    if job.deadline:
        spec["activeDeadlineSeconds"] = job.deadline
    metadata = _metadata(job)
    if job.elastic:
        metadata["annotations"] = {ELASTIC: f"{job.elastic.min_nodes}:{job.elastic.max_nodes}"}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def _with_patches(job: JobSpec) -> dict[str, Any]:
    """Return the TrainJob that patches the runtime SHARED."""
    template = _template(job)
    spec, container = template["spec"], template["spec"]["containers"][0]
    of_pod = {name: spec[name] for name in _OF_POD if name in spec}
    of_container = {name: container[name] for name in _OF_CONTAINER if name in container}
    patch = {
        "metadata": template["metadata"],
        "spec": {**of_pod, "containers": [{"name": NODE, **of_container}]},
    }
    trainer = {field: container[name] for name, field in _OF_TRAINER.items() if name in container}
    patched = {"name": NODE, "template": {"spec": {"template": patch}}}
    jobset = {"spec": {"replicatedJobs": [patched]}}
    body = {
        "runtimeRef": _reference(SHARED),
        "trainer": {**_numbers(job), **trainer},
        "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": jobset}}],
    }
    return _trainjob(job, body)


def _template(job: JobSpec) -> dict[str, Any]:
    """Return the pods' template, whole."""
    env = _rendezvous(job) if job.elastic else {}
    template = pod.template(job, container=NODE, env=env)
    restart = "OnFailure" if job.restart_policy == "OnFailure" else "Never"
    return {**template, "spec": {"restartPolicy": restart, **template["spec"]}}


def _rendezvous(job: JobSpec) -> dict[str, str]:
    """Let the nodes meet by torchrun's c10d: Trainer has no elastic jobs, and would fix their number."""
    return indexed_job.rendezvous(job, f"{job.name}-{NODE}-0-0.{job.name}")


def _runtime(metadata: dict[str, Any], job: JobSpec, template: dict[str, Any]) -> dict[str, Any]:
    replicated = {
        "name": NODE,
        "template": {"metadata": {"labels": _ANCESTOR}, "spec": {**_pod_failures(job), "template": template}},
    }
    spec = {
        "mlPolicy": {"numNodes": job.nodes, **({} if job.elastic else {"torch": {}})},
        "template": {"spec": {"failurePolicy": _job_failures(job), "replicatedJobs": [replicated]}},
    }
    return {"apiVersion": API_VERSION, "kind": RUNTIME, "metadata": metadata, "spec": spec}


def _pod_failures(job: JobSpec) -> dict[str, Any]:
    """Return the Job's pod failure policy.

    A program's own error (exit code 1 to 127) fails the Job for good; every other failure is a pod
    that was killed, preempted or deleted, or lost its peers. Of an elastic job only that pod is
    replaced, and the first node that succeeds ends the job.
    """
    if job.restart_policy != "ExitCode":
        on_failure = job.restart_policy == "OnFailure"  # Then this counts the containers of all pods.
        return {"backoffLimit": _RESTARTS * job.backoff * job.nodes if on_failure else 0}
    codes = {"containerName": NODE, "operator": "In", "values": list(range(1, 128))}
    lost = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [
        {"action": "Ignore" if job.elastic else "Count", **lost},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    if not job.elastic:
        return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    return {
        "backoffLimit": _RESTARTS * job.backoff * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "completionMode": "Indexed",
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _job_failures(job: JobSpec) -> dict[str, Any]:
    """Return the JobSet's failure policy: all pods restart together, or the TrainJob fails."""
    if job.restart_policy != "ExitCode" or job.elastic:
        return {"maxRestarts": 0}
    rule = {"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "maxRestarts": _RESTARTS * job.backoff,
        "restartStrategy": "BlockingRecreate",  # Not before the old pods are gone: rank 0's name must be one.
        "rules": [rule],
    }
