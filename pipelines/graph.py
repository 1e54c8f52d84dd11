"""The one pipeline: prepare the data, train, evaluate, export if it is good enough, and clean up at the end.

In the form of a search trials follow the data, each in a pod of its own, and then what is the best of them.

Starting a pod takes ten seconds or more, and every task of Kubeflow Pipelines has two pods: so download and
sharding are one step here, and work of a second is part of another step. If several pods share the data,
steps `assist` run at the same time as `prepare`, which needs none of them: see `components/sharing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components import environment, job_limits
from components.assist import assist
from components.cleanup import cleanup
from components.environment import SECRET_KEYS, SIGNING_FOLDER
from components.evaluate import evaluate
from components.export import export
from components.hooks import TRAIN
from components.images import COMPONENT_IMAGE
from components.jobs import PARAMETERS, VOLUME
from components.prepare import prepare
from components.train import train
from operations import openlineage
from operations.notifications import SECRET_KEYS as NOTICE_KEYS
from operations.tuning.best import best
from operations.tuning.trial import trial
from pipelines import ASSIST, CLEANUP, NAME, SEARCH, TITLES, parameters
from pipelines.forms import Form

_WAITING = ("250m", "512Mi")
"""CPU and memory of a step that starts something and waits."""

_RUN_ID = dsl.PIPELINE_JOB_ID_PLACEHOLDER

_LONGEST = "2592000s"
"""How long after a step's first try it may be tried again, and then runs at most: 30 days. Without it
Kubeflow says an hour, which would be the end of a training that began anew after an eviction."""

_SETTINGS = ("recipe", "overrides", "credentials")
"""Parameters that every step of the data and the training has."""

_PURPOSE = "Train a detector on a source of images, score it, and export it if it is good enough."
_SEARCH_PURPOSE = "Search for the hyper-parameters with which a recipe trains best on a source of images."

_GPU = "nvidia.com/gpu"

_UNROLLED = 16
"""Most assistants that are tasks of their own, of two pods each. A loop takes a pod more, and another one for
each item, but a task makes the compiled file, which Kubernetes limits, 5 KB longer."""


@dataclass(frozen=True)
class _Pods:
    """Settings of the pods of all steps. Each is a parameter of the pipeline, or empty."""

    credentials: Any
    notify: Any
    claim: Any
    cpu: Any
    memory: Any

    def step(self, task: dsl.PipelineTask, *, waits: bool = False) -> dsl.PipelineTask:
        """Set the resources, Secret and volume of a pod; one that `waits` only starts a job and waits."""
        cpu, memory = _WAITING if waits else (self.cpu, self.memory)
        # Of tasks of one component the name of the task has a number.
        _run(task, (TITLES | ASSIST | SEARCH)[task.component_spec.name], cpu, memory)
        # Keys that are not in the Secret, or no such Secret, leave the variables unset.
        kubernetes.use_secret_as_env(task, self.credentials, SECRET_KEYS, optional=True)
        if task.name in openlineage.STEPS:
            secret, keys = openlineage.SECRET, openlineage.SECRET_KEYS
            kubernetes.use_secret_as_env(task, secret, keys, optional=True)
        if self.claim:
            kubernetes.mount_pvc(task, self.claim, VOLUME)
        return task

    def tells(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Give a step that knows how the run ends the webhook's address."""
        return kubernetes.use_secret_as_env(task, self.notify, NOTICE_KEYS, optional=True)


def _run(task: dsl.PipelineTask, title: str, cpu: Any, memory: Any) -> dsl.PipelineTask:
    task.set_display_name(title)
    kubernetes.use_field_path_as_env(task, environment.RUN_ID, f"metadata.labels['{environment.RUN_LABEL}']")
    # No user id: OpenShift gives each namespace its own, and the image has one.
    kubernetes.set_security_context(task, run_as_non_root=True)
    # Requests, not limits: a step that needs more on a big set is slow then, not killed.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # Of a pod that was deleted or evicted; what fails otherwise the step itself tries again. It finds
    # what it had finished: shards, checkpoints, the training job.
    task.set_retry(num_retries=3, backoff_duration="30s", backoff_factor=2, backoff_max_duration=_LONGEST)
    # Kubeflow's cache would answer for data that has changed at its source, or was deleted
    # under the data root. The steps themselves find finished work, by its fingerprint.
    return task.set_caching_options(False)


def train_detector(values: Mapping[str, Any], form: Form) -> None:
    """Make the steps of a form, whose parameters are given by name."""
    of_pods = ("credentials", "notify", "claim", "step_cpu", "step_memory")
    pods = _Pods(*(values.get(name, "") for name in of_pods))
    clean_up = cleanup(launcher=values.get("launcher", ""), run_id=_RUN_ID)
    pods.tells(_run(clean_up, CLEANUP[clean_up.name], *_WAITING))
    with dsl.ExitHandler(clean_up, name="steps"):
        data = _prepare(pods, form, values)
        if form.conditional:
            with dsl.If(data.outputs["Output"] == TRAIN, name="pays"):
                _make_model(pods, data.outputs["shards"], values)
        elif form.trials:
            _search(pods, data.outputs["shards"], form, values)
        elif not form.until:
            _make_model(pods, data.outputs["shards"], values)


def _select(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _make_model(pods: _Pods, shards: Any, values: Mapping[str, Any]) -> None:
    request = _select(values, "launcher", *PARAMETERS)
    request |= {"claim": pods.claim, "default_image": COMPONENT_IMAGE}
    settings = _select(values, "job", "output", *_SETTINGS, "data_root", "warm_start")
    # The run's id is an argument of its own: Kubeflow replaces it only where it is the whole value.
    task = train(shards=shards, request=request, run_id=_RUN_ID, rules=values["gate"], **settings)
    # What `job` may ask for comes from the namespace's owner, and not from the run.
    kubernetes.use_config_map_as_env(task, job_limits.CONFIG_MAP, job_limits.VARIABLES, optional=True)
    model = pods.step(task, waits=True).outputs["model"]
    scored = pods.step(evaluate(model=model, rules=values["gate"], credentials=values["credentials"]))
    pods.tells(scored)
    with dsl.If(scored.outputs["Output"] == "pass", name="passed"):
        publishing = _select(values, "credentials", "signing", "registry")
        exported = pods.tells(pods.step(export(model=model, run_id=_RUN_ID, **publishing)))
        kubernetes.use_secret_as_volume(exported, values["signing"], SIGNING_FOLDER, optional=True)


def _search(pods: _Pods, shards: Any, form: Form, values: Mapping[str, Any]) -> None:
    settings = _select(values, "study", "space", "data_root", *_SETTINGS)
    settings |= {"shards": shards, "trials": form.trials}
    # Texts: Kubeflow's compiler calls each item of a list a text, and its driver then refuses another type.
    numbers = [str(number) for number in range(form.trials)]
    with dsl.ParallelFor(numbers, name="trials", parallelism=form.parallelism) as number:
        trained = pods.step(trial(number=number, gpus=form.gpus, **settings))
        if form.gpus:
            trained.set_accelerator_type(_GPU).set_accelerator_limit(form.gpus)
            # What processes of a node exchange; a container has 64 MB by itself.
            kubernetes.empty_dir_mount(trained, "shm", "/dev/shm", medium="Memory")  # noqa: S108
    pods.step(best(ended=dsl.Collected(trained.output), **settings))


def _prepare(pods: _Pods, form: Form, values: Mapping[str, Any]) -> Any:
    """Download and shard, in as many pods as there are partitions; returns the task of the first."""
    settings = _select(values, "data_root", *_SETTINGS)
    own = settings | _select(values, "source", "data_version", "prune")
    # Parameters of the conditional form; 0 in all others.
    own |= {"min_new_images": values.get("min_new_images", 0), "min_drift": values.get("min_drift", 0.0)}
    task = prepare(trains=not form.until, partitions=form.partitions, **own)
    assistants = range(1, form.partitions)
    if len(assistants) <= _UNROLLED:
        for _ in assistants:
            pods.step(assist(**settings))
    else:
        with dsl.ParallelFor([str(number) for number in assistants], name="assistants"):
            pods.step(assist(**settings))
    return pods.tells(pods.step(task))


def pipeline(form: Form) -> Any:
    """Return kfp's pipeline in one of its forms, to be compiled; it has the parameters of the form."""
    signature = parameters.signature(form)

    def build(*values: Any) -> None:
        train_detector(dict(zip(signature.parameters, values, strict=True)), form)

    build.__doc__ = parameters.docstring(_SEARCH_PURPOSE if form.trials else _PURPOSE, form)
    build.__signature__ = signature  # type: ignore[attr-defined]
    # All three: Kubeflow's own settings name an hour for each, and those of success and failure come first.
    ttls = [f"ttl_seconds_after_{end}" for end in ("finished", "success", "failure")]
    limits = {"active_deadline_seconds": form.deadline, **dict.fromkeys(ttls, form.ttl)}
    config = dsl.PipelineConfig(**{name: value for name, value in limits.items() if value})
    title = "Search for hyper-parameters" if form.trials else "Train an object detector"
    return dsl.pipeline(name=NAME, display_name=title, pipeline_config=config)(build)
