"""The one pipeline: prepare the data, train, evaluate, export if it is good enough, and clean up at the end.

Every pod costs a run its ten seconds or more, whatever it does, and every task of Kubeflow Pipelines has two:
so download and sharding are one step here, and what takes a second is part of another. Where the data are
large enough to be shared by several pods, `plan` divides the work, `fetch` and `write` do a part each, and
`download` and `shard` put the parts together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components.cleanup import cleanup
from components.download import download
from components.evaluate import evaluate
from components.export import export
from components.fetch import fetch
from components.images import COMPONENT_IMAGE
from components.jobs import PARAMETERS, VOLUME
from components.object_store import SECRET_KEYS
from components.plan import plan
from components.prepare import prepare
from components.shard import shard
from components.signing_secret import FOLDER
from components.train import train
from components.write import write
from pipelines import CLEANUP, NAME, SHARED, TITLES, parameters
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


@dataclass(frozen=True)
class _Pods:
    """What the pods of the steps are given. Each is a parameter of the pipeline, or empty."""

    credentials: Any
    claim: Any
    cpu: Any
    memory: Any

    def step(self, task: dsl.PipelineTask, *, waits: bool = False) -> dsl.PipelineTask:
        """Give a step's pod what it needs: one that works, or one that waits for others."""
        cpu, memory = _WAITING if waits else (self.cpu, self.memory)
        _run(task, (TITLES | SHARED)[task.name], cpu, memory)
        # Keys that are not in the Secret, or no such Secret, leave the variables unset.
        kubernetes.use_secret_as_env(task, self.credentials, SECRET_KEYS, optional=True)
        if self.claim:
            kubernetes.mount_pvc(task, self.claim, VOLUME)
        return task


def _run(task: dsl.PipelineTask, title: str, cpu: Any, memory: Any) -> dsl.PipelineTask:
    task.set_display_name(title)
    # Requests, not limits: a step that needs more on a big set is slow then, not killed.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # Of a pod that was deleted or evicted; what fails otherwise the step itself tries again. It finds
    # what it had finished: shards, checkpoints, the training job.
    task.set_retry(num_retries=3, backoff_duration="30s", backoff_factor=2, backoff_max_duration=_LONGEST)
    # Kubeflow's cache would answer for data that has changed at its source, or was deleted
    # under the data root. The steps themselves find finished work, by its fingerprint.
    return task.set_caching_options(False)


def train_detector(given: Mapping[str, Any], form: Form) -> None:
    """Make the steps.

    Args:
        given: the parameters that the form has, by name, as `pipelines/parameters.py` tells them.
        form: what is fixed when the pipeline is compiled.
    """
    pods = _Pods(given["credentials"], given.get("claim", ""), given["step_cpu"], given["step_memory"])
    ending = cleanup(launcher="" if form.until else given["launcher"], run_id=_RUN_ID)
    _run(ending, CLEANUP[ending.name], *_WAITING)
    with dsl.ExitHandler(ending, name="steps"):
        shards = _share(pods, form, given) if form.shared else _prepare(pods, given)
        if not form.until:
            _judge(pods, _train(pods, shards, given), given)


def _some(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names}


def _train(pods: _Pods, shards: Any, given: Mapping[str, Any]) -> Any:
    """Train on the shards; returns the model's manifest."""
    request = _some(given, "launcher", *PARAMETERS) | {"claim": pods.claim, "default_image": COMPONENT_IMAGE}
    more = _some(given, "job", "output", *_SETTINGS, "data_root")
    # The run's id on its own: Kubeflow replaces it where it is all of a value alone.
    task = train(shards=shards, request=request, run_id=_RUN_ID, rules=given["gate"], **more)
    return pods.step(task, waits=True).outputs["model"]


def _judge(pods: _Pods, model: Any, given: Mapping[str, Any]) -> None:
    """Score the model, and publish it where it is good enough."""
    scored = pods.step(evaluate(model=model, rules=given["gate"], credentials=given["credentials"]))
    with dsl.If(scored.outputs["Output"] == "pass", name="passed"):
        publishing = _some(given, "credentials", "signing", "registry")
        exported = pods.step(export(model=model, run_id=_RUN_ID, **publishing))
        kubernetes.use_secret_as_volume(exported, given["signing"], FOLDER, optional=True)


def _prepare(pods: _Pods, given: Mapping[str, Any]) -> Any:
    """Download and shard in one pod; returns the shards' manifest."""
    task = prepare(**_some(given, "source", "data_version", "data_root", *_SETTINGS))
    return pods.step(task).outputs["shards"]


def _share(pods: _Pods, form: Form, given: Mapping[str, Any]) -> Any:
    """Download and shard, each in as many pods as there are partitions; returns the shards' manifest."""
    of_part = _some(given, *_SETTINGS)
    placed = of_part | _some(given, "data_root")
    listed = placed | _some(given, "source", "data_version")
    planned = pods.step(plan(partitions=given["partitions"], **listed))
    with dsl.ParallelFor(planned.output, name="fetching", parallelism=form.parallelism) as part:
        fetched = pods.step(fetch(part=part, **of_part))
    raw = pods.step(download(parts=dsl.Collected(fetched.output), **listed)).outputs["raw"]
    with dsl.ParallelFor(planned.output, name="writing", parallelism=form.parallelism) as part:
        written = pods.step(write(raw=raw, part=part, **placed))
    return pods.step(shard(raw=raw, parts=dsl.Collected(written.output), **placed)).outputs["shards"]


def pipeline(form: Form) -> Any:
    """Return the pipeline in one of its forms.

    A parameter is there where it means something. With a volume `claim` is required, and the data are
    kept there unless told otherwise.

    Args:
        form: what is fixed when the pipeline is compiled.

    Returns:
        kfp's pipeline, to be compiled.
    """
    signature = parameters.signature(form)

    def traced(*values: Any) -> None:
        train_detector(dict(zip(signature.parameters, values, strict=True)), form)

    traced.__doc__ = parameters.docstring(_PURPOSE, form)
    traced.__signature__ = signature  # type: ignore[attr-defined]
    # All three: Kubeflow's own settings name an hour for each, and those of success and failure come first.
    ttls = [f"ttl_seconds_after_{end}" for end in ("finished", "success", "failure")]
    limits = {"active_deadline_seconds": form.deadline, **dict.fromkeys(ttls, form.ttl)}
    config = dsl.PipelineConfig(**{name: value for name, value in limits.items() if value})
    return dsl.pipeline(name=NAME, display_name="Train an object detector", pipeline_config=config)(traced)
