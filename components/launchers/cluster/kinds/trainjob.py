"""TrainJobs of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1, release 2.3).

A TrainJob refers to a TrainingRuntime, a template, and says what differs from it. Ours (SHARED)
has what every job of kubedet needs. A job that needs more than a TrainJob can say (a priority
class, a scheduler, how often it may be restarted, ...) brings its own runtime, which belongs
to it. Source: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1 and pkg/runtime/framework;
kubernetes-sigs/jobset v0.12, failure policies; Kubernetes, "Pod failure policy".
"""

from collections.abc import Mapping
from contextlib import suppress

from components.launchers import pod_template
from components.launchers.backend import Phase
from components.launchers.cluster.kinds.kind import Body, Exists, Kind, Standing, by_condition, holding
from components.launchers.spec import JobSpec
from trainer.launching.job_status import Progress

GROUP = "trainer.kubeflow.org"
API_VERSION = f"{GROUP}/v1alpha1"
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

_PHASES = {"Failed": Phase.FAILED, "Complete": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED}
_LONGEST_NAME = 63
_RANDOM = 6  # Characters that end a pod's name: -x8k2p.
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


class TrainJob(Kind):
    """A JobSet of one Job, whose pods are the nodes; it has no condition for a job that runs."""

    name = "trainjob"
    title = "TrainJob"
    controller = "Kubeflow Trainer (v2.3) and JobSet"
    group, version, plural = GROUP, "v1alpha1", "trainjobs"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    attempt_label = "jobset.sigs.k8s.io/restart-attempt"

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        if fits_shared(job) and exists("trainingruntimes", SHARED):
            return [_with_patches(job)]
        metadata = {**pod_template.job_metadata(job), "name": f"{job.name}-{job.fingerprint[:8]}"}
        body = {"runtimeRef": _reference(metadata["name"]), "trainer": _numbers(job)}
        return [_runtime(metadata, job, _template(job)), _trainjob(job, body)]

    def problems(self, manifests: list[Body]) -> list[str]:
        job = manifests[-1]
        trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
        nodes = trainer["numNodes"]
        longest = _LONGEST_NAME - _RANDOM - len(f"-{NODE}-0-{nodes - 1}")
        reserved = [item["name"] for item in trainer.get("env") or [] if item["name"] in _RESERVED]
        problems = [f"spec.trainer.env: {name} is set by the controller" for name in reserved]
        if len(name) > longest:
            problems.append(
                f"metadata.name {name!r} has {len(name)} characters; a TrainJob of {nodes} nodes may have "
                f"{longest}, because the names of its pods are longer"
            )
        return problems

    def left_out(self, job: JobSpec) -> list[str]:
        default = JobSpec(command=("true",))
        return [name for name in ("clean_pods", "ttl") if getattr(job, name) != getattr(default, name)]

    def probe(self) -> Body:
        """Return a job of a runtime that does not exist: a controller that answers says so."""
        metadata, spec = {"generateName": "kubedet-probe-"}, {"runtimeRef": _reference("kubedet-probe")}
        return {"apiVersion": API_VERSION, "kind": self.title, "metadata": metadata, "spec": spec}

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        return int(labels.get("batch.kubernetes.io/job-completion-index", 0))

    def nodes(self, job: Body) -> int:
        return (job["spec"].get("trainer") or {}).get("numNodes") or 1

    def bounds(self, job: Body) -> tuple[int, int] | None:
        text = (job["metadata"].get("annotations") or {}).get(ELASTIC, "")
        fewest, _, most = text.partition(":")
        return (int(fewest), int(most)) if text else None

    def standing(self, job: Body) -> Standing:
        suspended = Phase.SUSPENDED if job["spec"].get("suspend") else None
        return by_condition(holding(job), _PHASES) or Standing(suspended)

    def progress(self, job: Body) -> Progress | None:
        """Return what the training reported to the controller."""
        status = (job.get("status") or {}).get("trainerStatus") or {}
        if "progressPercentage" not in status:
            return None
        metrics: dict[str, float] = {}
        for item in status.get("metrics") or []:
            with suppress(LookupError, ValueError):
                metrics[item["name"]] = float(item["value"])
        return Progress(status["progressPercentage"], status.get("estimatedRemainingSeconds"), metrics)

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        return ((self.title, name), ("JobSet", name), ("Job", f"{name}-{NODE}-0"))


def shared_runtime() -> Body:
    """Return the runtime SHARED, as it stands in YAML."""
    job = JobSpec(command=("true",))
    runtime_labels = {
        "app.kubernetes.io/name": "kubedet",
        pod_template.LABEL_MANAGED: pod_template.MANAGED_BY,
    }
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


def _reference(name: str) -> dict[str, str]:
    return {"apiGroup": GROUP, "kind": RUNTIME, "name": name}


def _numbers(job: JobSpec) -> Body:
    return {"numNodes": job.nodes, "numProcPerNode": job.processes}


def _trainjob(job: JobSpec, spec: Body) -> Body:
    if job.suspend or job.kueue_queue:
        spec["suspend"] = True  # Kueue starts what it admits.
    if job.deadline:
        spec["activeDeadlineSeconds"] = job.deadline
    metadata = pod_template.job_metadata(job)
    if job.elastic:
        metadata["annotations"] = {ELASTIC: f"{job.elastic.min_nodes}:{job.elastic.max_nodes}"}
    return {"apiVersion": API_VERSION, "kind": TrainJob.title, "metadata": metadata, "spec": spec}


def _with_patches(job: JobSpec) -> Body:
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


def _template(job: JobSpec) -> Body:
    """Return the pods' template, whole."""
    # Trainer has no elastic jobs, and would fix their number: the nodes meet by torchrun's c10d.
    env = pod_template.rendezvous(job, f"{job.name}-{NODE}-0-0.{job.name}") if job.elastic else {}
    template = pod_template.template(job, container=NODE, env=env)
    restart = "OnFailure" if job.restart_policy == "OnFailure" else "Never"
    return {**template, "spec": {"restartPolicy": restart, **template["spec"]}}


def _runtime(metadata: Body, job: JobSpec, template: Body) -> Body:
    replicated = {
        "name": NODE,
        "template": {"metadata": {"labels": _ANCESTOR}, "spec": {**_pod_failures(job), "template": template}},
    }
    spec = {
        "mlPolicy": {"numNodes": job.nodes, **({} if job.elastic else {"torch": {}})},
        "template": {"spec": {"failurePolicy": _job_failures(job), "replicatedJobs": [replicated]}},
    }
    return {"apiVersion": API_VERSION, "kind": RUNTIME, "metadata": metadata, "spec": spec}


def _pod_failures(job: JobSpec) -> Body:
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


def _job_failures(job: JobSpec) -> Body:
    """Return the JobSet's failure policy: all pods restart together, or the TrainJob fails."""
    if job.restart_policy != "ExitCode" or job.elastic:
        return {"maxRestarts": 0}
    rule = {"name": "error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "maxRestarts": _RESTARTS * job.backoff,
        "restartStrategy": "BlockingRecreate",  # Not before the old pods are gone: rank 0's name must be one.
        "rules": [rule],
    }
