"""The kinds of training jobs in a cluster: PyTorchJobs and TrainJobs. No other module depends on a kind.

A TrainJob refers to a TrainingRuntime (a template) and overrides parts of it. The shared runtime has what all
jobs of kubedet need. A job that needs more (a priority class, a scheduler, other restarts) gets
its own runtime. Source: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1 and
pkg/runtime/framework; kubernetes-sigs/jobset v0.12, failure policies; Kubernetes, "Pod failure policy".
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kubeflow.training.models import (
    KubeflowOrgV1ElasticPolicy,
    KubeflowOrgV1PyTorchJob,
    KubeflowOrgV1PyTorchJobSpec,
    KubeflowOrgV1ReplicaSpec,
    KubeflowOrgV1RunPolicy,
)
from kubernetes.client import V1EnvVar, V1EnvVarSource, V1ObjectFieldSelector

from components.launchers import pod_template
from components.launchers.backend import Phase
from components.launchers.kubernetes_names import LABEL_MANAGED, MANAGED_BY
from components.launchers.pod_template import Body, to_body
from components.launchers.spec import Elastic, JobSpec

if TYPE_CHECKING:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime

Exists = Callable[[str, str], bool]  # Takes resource (plural) and name; whether kubedet created the object.


class Resource(NamedTuple):
    """API path of a resource that the Kubernetes client has no class for."""

    group: str
    version: str
    plural: str


class State(NamedTuple):
    """The state of a job, from its specification and its conditions."""

    nodes: int  # Number of requested pods.
    needed: int  # Number of pods that must run for the job to run.
    elastic: bool
    phase: Phase | None = None  # Final or suspended; None: the pods decide.
    reason: str = ""
    message: str = ""
    restarting: bool = False  # Whether its controller reports that it recreates pods.


class Kind(Protocol):
    """One kind of training job. Methods with a body are defaults."""

    name: str  # Name of the launcher: pytorchjob.
    title: str  # Name in the cluster: PyTorchJob.
    controller: str  # Program that creates its pods, for messages.
    group: str
    version: str
    plural: str
    pod_label: str  # Label of a pod that names its job.
    attempt_label: str = ""  # Label of a pod with the number of pods that it replaced.

    @property
    def resource(self) -> Resource:
        """API path of the jobs."""
        return Resource(self.group, self.version, self.plural)

    def body(self, metadata: Body, spec: Body) -> Body:
        """Return a job from its metadata and specification."""
        version = f"{self.group}/{self.version}"
        return {"apiVersion": version, "kind": self.title, "metadata": metadata, "spec": spec}

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        """Return the objects to create for a job that has an image; the job comes last."""
        ...

    def problems(self, manifests: list[Body]) -> list[str]:
        """Return a line for each setting that the controller would reject or overwrite."""
        return []

    def unsupported_fields(self, job: JobSpec) -> list[str]:
        """Return the fields of a job that this kind does not support."""
        return []

    def probe(self) -> Body:
        """Return a minimal job, whose creation as a dry run shows whether the controller responds."""
        ...

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        """Return the index of a pod's node, from 0, from the pod's labels."""
        ...

    def state(self, job: Body) -> State:
        """Return a job's state from its specification and conditions."""
        ...

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the objects whose events concern a job: kind and name of each."""
        return ((self.title, name),)


def find_true_conditions(job: Body) -> dict[str, Body]:
    """Return the conditions of an object whose status is True, by type."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return {item["type"]: item for item in conditions if item.get("status") == "True"}


def _with_condition(state: State, job: Body, phases: Mapping[str, Phase | None]) -> State:
    """Return a state with the phase of the first of these condition types that is True."""
    conditions = find_true_conditions(job)
    for name, phase in phases.items():
        if condition := conditions.get(name):
            reason, message = condition.get("reason") or "", condition.get("message") or ""
            return state._replace(phase=phase, reason=reason, message=message, restarting=phase is None)
    return state


_PYTORCHJOB_PHASES = {
    "Failed": Phase.FAILED, "Succeeded": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED, "Restarting": None,
}  # fmt: skip
"""Running is left out: the operator sets it late, and as soon as one pod runs."""
_INDEX_KEY = "training.kubeflow.org/replica-index"


class PyTorchJob(Kind):
    """Has Workers but no Master: next to a Master, the operator adds an init container to Workers, which Pod
    Security `restricted` refuses. Its elasticPolicy sets torchrun's variables, even for a fixed size.
    """

    name = "pytorchjob"
    title = "PyTorchJob"
    controller = "the Training Operator (v1.9)"
    group, version, plural = "kubeflow.org", "v1", "pytorchjobs"
    pod_label = "training.kubeflow.org/job-name"

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        # The rank of a node is the index of its pod, as in all messages; c10d would assign ranks itself.
        label = V1EnvVarSource(field_ref=V1ObjectFieldSelector(field_path=f"metadata.labels['{_INDEX_KEY}']"))
        template = pod_template.make_pod_template(job)
        template.spec.containers[0].env.append(V1EnvVar("PET_NODE_RANK", value_from=label))
        bounds = job.elastic or Elastic(job.nodes, job.nodes, 0)
        elastic_policy = KubeflowOrgV1ElasticPolicy(
            min_replicas=bounds.min_nodes,
            max_replicas=bounds.max_nodes,
            max_restarts=bounds.max_restarts,
            rdzv_backend="c10d" if job.elastic else "static",
            rdzv_id=job.name,
        )
        spec = KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(job.processes),
            elastic_policy=elastic_policy if job.elastic or job.nodes > 1 else None,
            run_policy=KubeflowOrgV1RunPolicy(
                clean_pod_policy="Running",
                backoff_limit=job.backoff,
                ttl_seconds_after_finished=job.ttl,
                active_deadline_seconds=job.deadline or None,
                suspend=pod_template.is_suspended(job),
            ),
            pytorch_replica_specs={
                "Worker": KubeflowOrgV1ReplicaSpec(
                    replicas=job.nodes, restart_policy="ExitCode", template=template
                )
            },
        )
        pytorchjob = KubeflowOrgV1PyTorchJob(
            api_version=f"{self.group}/{self.version}",
            kind=self.title,
            metadata=pod_template.job_metadata(job),
            spec=spec,
        )
        return [to_body(pytorchjob)]

    def probe(self) -> Body:
        container = {"name": pod_template.CONTAINER, "image": "none"}
        replica = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
        return self.body({"generateName": "kubedet-probe-"}, {"pytorchReplicaSpecs": {"Worker": replica}})

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        return int(labels.get(_INDEX_KEY, 0))

    def state(self, job: Body) -> State:
        replicas, policy = job["spec"]["pytorchReplicaSpecs"], job["spec"].get("elasticPolicy") or {}
        nodes = sum(item.get("replicas", 1) for item in replicas.values())
        state = State(nodes, policy.get("minReplicas") or nodes, policy.get("rdzvBackend") == "c10d")
        suspended = (job["spec"].get("runPolicy") or {}).get("suspend")
        if suspended and not find_true_conditions(job).keys() & {"Failed", "Succeeded", "Suspended"}:
            return state._replace(phase=Phase.SUSPENDED)
        return _with_condition(state, job, _PYTORCHJOB_PHASES)


GROUP = "trainer.kubeflow.org"
API_VERSION = f"{GROUP}/v1alpha1"
SHARED_RUNTIME = "kubedet"  # Name of the runtime that deploy/ puts into a namespace.
_RUNTIME = "TrainingRuntime"
_BOUNDS_KEY = "kubedet/elastic"  # Annotation of an elastic job: minimum and maximum number of nodes, MIN:MAX.
_NODE_NAME = "node"  # Name of the replicated job and of its container, which the controller requires.
_ANCESTOR_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_MANAGER_NAME = "kubedet.dev/launcher"
_RESTARTS_PER_BACKOFF = 10  # The launcher does not count restarts before a newer checkpoint.

_RUNTIME_FIELDS = {"automountServiceAccountToken", "enableServiceLinks", "restartPolicy"}
"""Fields of all pods of kubedet that the shared runtime sets, and a TrainJob cannot."""

_TRAINJOB_PHASES = {"Failed": Phase.FAILED, "Complete": Phase.SUCCEEDED, "Suspended": Phase.SUSPENDED}
_MAX_NAME_LENGTH = 63 - 6  # A pod's name ends with 6 random characters: -x8k2p.
_RESERVED_NAMES = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)


class TrainJob(Kind):
    """Runs as a JobSet with one Job, whose pods are the nodes. No condition says that it is running."""

    name = "trainjob"
    title = "TrainJob"
    controller = "Kubeflow Trainer (v2.3) and JobSet"
    group, version, plural = GROUP, "v1alpha1", "trainjobs"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    attempt_label = "jobset.sigs.k8s.io/restart-attempt"

    def manifests(self, job: JobSpec, exists: Exists) -> list[Body]:
        from kubeflow_trainer_api import models  # Importing it takes a second.

        template, metadata = _make_template(job), to_body(pod_template.job_metadata(job))
        runtime = {**metadata, "name": f"{job.name}-{job.fingerprint[:8]}"}
        is_shared = fits_shared_runtime(job) and exists("trainingruntimes", SHARED_RUNTIME)
        trainer: Body = {"numNodes": job.nodes, "numProcPerNode": job.processes}
        patches = []
        if is_shared:
            container = template["spec"]["containers"][0]
            trainer |= {
                field: container[name] for name, field in _TRAINER_FIELDS.items() if name in container
            }
            patch = models.TrainerV1alpha1PodTemplatePatch.from_dict(template)
            patch.spec.containers[0].env = None  # It is in `trainer`.
            replicated = models.TrainerV1alpha1ReplicatedJobPatch(
                name=_NODE_NAME,
                template=models.TrainerV1alpha1JobTemplatePatch(
                    spec=models.TrainerV1alpha1JobSpecPatch(template=patch)
                ),
            )
            jobset = models.TrainerV1alpha1JobSetTemplatePatch(
                spec=models.TrainerV1alpha1JobSetSpecPatch(replicated_jobs=[replicated])
            )
            runtime_spec = models.TrainerV1alpha1TrainingRuntimeSpecPatch(template=jobset)
            patches.append(
                models.TrainerV1alpha1RuntimePatch(manager=_MANAGER_NAME, training_runtime_spec=runtime_spec)
            )
        if job.elastic:
            metadata["annotations"] = {_BOUNDS_KEY: f"{job.elastic.min_nodes}:{job.elastic.max_nodes}"}
        spec = models.TrainerV1alpha1TrainJobSpec(
            runtime_ref=models.TrainerV1alpha1RuntimeRef(
                api_group=GROUP, kind=_RUNTIME, name=SHARED_RUNTIME if is_shared else runtime["name"]
            ),
            trainer=models.TrainerV1alpha1Trainer.from_dict(trainer),
            runtime_patches=patches or None,
            active_deadline_seconds=job.deadline or None,
            suspend=pod_template.is_suspended(job),
        )
        trainjob = self.body(metadata, spec.to_dict())
        return [trainjob] if is_shared else [_make_runtime(runtime, job, template).to_dict(), trainjob]

    def problems(self, manifests: list[Body]) -> list[str]:
        job = manifests[-1]
        trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
        nodes = trainer["numNodes"]
        longest = _MAX_NAME_LENGTH - len(f"-{_NODE_NAME}-0-{nodes - 1}")
        reserved = [item["name"] for item in trainer.get("env") or [] if item["name"] in _RESERVED_NAMES]
        problems = [f"spec.trainer.env: {name} is set by the controller" for name in reserved]
        if len(name) > longest:
            problems.append(
                f"metadata.name {name!r} has {len(name)} characters; a TrainJob of {nodes} nodes may have "
                f"{longest}, because the names of its pods are longer"
            )
        return problems

    def unsupported_fields(self, job: JobSpec) -> list[str]:
        return ["ttl"] if job.ttl != JobSpec(command=("true",)).ttl else []

    def probe(self) -> Body:
        """Return a job with a runtime that does not exist: a controller that responds reports that."""
        reference = {"apiGroup": GROUP, "kind": _RUNTIME, "name": "kubedet-probe"}
        return self.body({"generateName": "kubedet-probe-"}, {"runtimeRef": reference})

    def rank(self, job: Body, labels: Mapping[str, str]) -> int:
        return int(labels.get("batch.kubernetes.io/job-completion-index", 0))

    def state(self, job: Body) -> State:
        nodes = (job["spec"].get("trainer") or {}).get("numNodes") or 1
        bounds = (job["metadata"].get("annotations") or {}).get(_BOUNDS_KEY, "")
        needed = int(bounds.partition(":")[0]) if bounds else nodes
        suspended = Phase.SUSPENDED if job["spec"].get("suspend") else None
        state = State(nodes, needed, bool(bounds), suspended)
        return _with_condition(state, job, _TRAINJOB_PHASES)

    def event_objects(self, name: str) -> tuple[tuple[str, str], ...]:
        return ((self.title, name), ("JobSet", name), ("Job", f"{name}-{_NODE_NAME}-0"))


def shared_runtime() -> Body:
    """Return the shared runtime, as parsed from YAML."""
    job = JobSpec(command=("true",))
    managed = {"app.kubernetes.io/name": "kubedet", LABEL_MANAGED: MANAGED_BY}
    own = {name: value for name, value in _make_template(job)["spec"].items() if name in _RUNTIME_FIELDS}
    # Without metadata the controller briefly fails for jobs that Kueue evicted.
    template = {"metadata": {"labels": managed}, "spec": {**own, "containers": [{"name": _NODE_NAME}]}}
    body: Body = _make_runtime({"name": SHARED_RUNTIME, "labels": managed}, job, template).to_dict()
    return body


_TRAINER_FIELDS = {"image": "image", "command": "command", "env": "env", "resources": "resourcesPerNode"}
"""Fields of a container, and their names in the `trainer` of a TrainJob."""


def fits_shared_runtime(job: JobSpec) -> bool:
    """Whether a job can use the shared runtime, because a TrainJob has fields for all of its settings."""
    from kubeflow_trainer_api import models

    if job.elastic or job.backoff != JobSpec(command=("true",)).backoff:
        return False
    spec = _make_template(job)["spec"]
    patch = models.TrainerV1alpha1PodSpecPatch.from_dict(spec).to_dict()
    (container,), (patched,) = spec["containers"], patch["containers"]
    return set(spec) <= {*patch, *_RUNTIME_FIELDS} and set(container) <= {*patched, *_TRAINER_FIELDS}


def _make_template(job: JobSpec) -> Body:
    # Trainer has no elastic jobs, and would fix the number of nodes: they use torchrun's c10d rendezvous.
    first = f"{job.name}-{_NODE_NAME}-0-0.{job.name}"
    env = pod_template.rendezvous_variables(job, first) if job.elastic else {}
    return to_body(pod_template.make_pod_template(job, container=_NODE_NAME, env=env, restart_policy="Never"))


def _make_runtime(metadata: Body, job: JobSpec, template: Body) -> "TrainerV1alpha1TrainingRuntime":
    """Return a runtime with its policies for failures.

    An error of the program (exit code 1 to 127) permanently fails the Job and the TrainJob. After any other
    failure (a pod was killed, preempted or deleted, or lost its peers), all pods are restarted. In an elastic
    job, only the lost pod is replaced, and the job ends when the first node succeeds.
    """
    from kubeflow_trainer_api import models

    restarts = _RESTARTS_PER_BACKOFF * job.backoff
    codes = {"containerName": _NODE_NAME, "operator": "In", "values": list(range(1, 128))}
    lost = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [
        {"action": "Ignore" if job.elastic else "Count", **lost},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    job_failures: Body = {"podFailurePolicy": {"rules": rules}}
    if job.elastic:
        jobset_failures = models.JobsetV1alpha2FailurePolicy(max_restarts=0)
        success = {"rules": [{"succeededCount": 1}]}
        job_failures |= {
            "backoffLimit": restarts * job.nodes,
            "completionMode": "Indexed",
            "successPolicy": success,
        }
    else:
        job_failures["backoffLimit"] = 0
        rule = models.JobsetV1alpha2FailurePolicyRule(
            name="error", action="FailJobSet", on_job_failure_reasons=["PodFailurePolicy"]
        )
        # Recreate the pods only when the old ones are gone, because the name of rank 0 must be unique.
        jobset_failures = models.JobsetV1alpha2FailurePolicy(
            max_restarts=restarts, restart_strategy="BlockingRecreate", rules=[rule]
        )
    job_template = {"metadata": {"labels": _ANCESTOR_LABEL}, "spec": {**job_failures, "template": template}}
    replicated = models.JobsetV1alpha2ReplicatedJob(
        name=_NODE_NAME, template=models.IoK8sApiBatchV1JobTemplateSpec.from_dict(job_template)
    )
    jobset = models.JobsetV1alpha2JobSetSpec(failure_policy=jobset_failures, replicated_jobs=[replicated])
    return models.TrainerV1alpha1TrainingRuntime(
        api_version=API_VERSION,
        kind=_RUNTIME,
        metadata=models.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(metadata),
        spec=models.TrainerV1alpha1TrainingRuntimeSpec(
            ml_policy=models.TrainerV1alpha1MLPolicy(
                num_nodes=job.nodes,
                torch=None if job.elastic else models.TrainerV1alpha1TorchMLPolicySource(),
            ),
            template=models.TrainerV1alpha1JobSetTemplateSpec(spec=jobset),
        ),
    )


KINDS: dict[str, Kind] = {kind.name: kind for kind in (PyTorchJob(), TrainJob())}
"""The kinds by name. If a cluster supports several, the first is used unless the user chooses another."""
