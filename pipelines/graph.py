"""The one pipeline: prepare the data, train, evaluate, export if it is good enough, and clean up at the end.

Every pod costs a run its ten seconds or more, whatever it does, and every task of Kubeflow Pipelines has two:
so download and sharding are one step here, and what takes a second is part of another. Where the data are
large enough to be shared by several pods, `plan` divides the work, `fetch` and `write` do a part each, and
`download` and `shard` put the parts together.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components import launchers
from components.cleanup import cleanup
from components.download import download
from components.evaluate import evaluate
from components.export import export
from components.fetch import fetch
from components.images import COMPONENT_IMAGE
from components.jobs import VOLUME
from components.plan import plan
from components.prepare import prepare
from components.shard import shard
from components.signing import FOLDER, SIGNING
from components.stores import CREDENTIALS, SECRET_KEYS
from components.train import train
from components.write import write
from pipelines import CLEANUP, NAME, SHARED, TITLES
from pipelines.forms import Form
from pipelines.sizes import SIZES

DATA_ROOT = f"{VOLUME}/kubedet"
"""The data root of a pipeline with a volume, where nobody names another."""

_CPU, _MEMORY = SIZES["small"]
_WAITING = ("250m", "512Mi")
"""CPU and memory of a step that starts something and waits."""

_RUN_ID = dsl.PIPELINE_JOB_ID_PLACEHOLDER

_LONGEST = "2592000s"
"""How long after a step's first try it may be tried again, and then runs at most: 30 days. Without it
Kubeflow says an hour, which would be the end of a training that began anew after an eviction."""

_TRAINING = ("gate", "launcher", "nodes", "nproc", "gpus", "image", "job", "output", "signing", "registry")
"""Parameters that mean nothing to a pipeline that ends with the shards."""


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


def train_detector(
    data_root: str,
    source: str = "sample",
    recipe: str = "debug",
    overrides: dict = {},  # noqa: B006 (kfp copies it into the compiled file)
    gate: str = "",
    launcher: str = launchers.DEFAULT,
    nodes: int = 1,
    nproc: int = 0,
    gpus: int = 0,
    image: str = "",
    job: dict = {},  # noqa: B006
    output: str = "",
    credentials: str = CREDENTIALS,
    claim: str = "",
    data_version: str = "",
    partitions: int = 2,
    step_cpu: str = _CPU,
    step_memory: str = _MEMORY,
    signing: str = SIGNING,
    registry: str = "",
    *,
    form: Form,
) -> None:
    """Train a detector on a source of images, score it, and export it if it is good enough.

    Args:
        data_root: URI under which data is kept; every step must reach it.
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a whole configuration; `kubedet recipes` lists them.
        overrides: dotted configuration keys and their values, e.g. {"train.epochs": 10}.
        gate: `metric >= number`, parted by commas, to be met for an export; empty takes the recipe's.
        launcher: what trains: `kubernetes` (a PyTorchJob or a TrainJob, whichever the cluster runs),
            `pytorchjob`, `trainjob`, or `local` (the step's own pod).
        nodes: machines that train.
        nproc: training processes on each machine; 0 is one for each GPU, or one.
        gpus: GPUs of each machine.
        image: container image of the training; empty is the steps' own.
        job: further fields of the training job (`kubedet job fields`), e.g. {"memory_limit": "64Gi"}.
        output: URI of the run's folder; empty is `<data_root>/runs/<run>`.
        credentials: Secret with the object store's keys; none of them is required.
        claim: PersistentVolumeClaim that every pod mounts at /data.
        data_version: name for the data as they are now; a known one brings its data back.
        partitions: pods that share the download, and then the sharding; the result is the same.
        step_cpu: CPU that the pods of the steps ask for that work on data or the model, e.g. 2 or 500m.
        step_memory: memory that they ask for, e.g. 8Gi.
        signing: Secret whose `private.pem` signs the exported model; the default one need not exist.
        registry: URL of the Kubeflow Model Registry that is told of the exported model; empty is none.
        form: what is fixed when the pipeline is compiled; no parameter.
    """
    pods = _Pods(credentials, claim, step_cpu, step_memory)
    data = {"recipe": recipe, "overrides": overrides, "data_root": data_root, "credentials": credentials}
    asked = {"launcher": launcher, "nodes": nodes, "nproc": nproc, "gpus": gpus, "image": image, "job": job}
    ending = cleanup(launcher="" if form.until else launcher, run_id=_RUN_ID)
    _run(ending, CLEANUP[ending.name], *_WAITING)
    with dsl.ExitHandler(ending, name="steps"):
        prepared = _share if form.shared else _prepare
        shards = prepared(pods, form, source, data_version, partitions, data)
        if not form.until:
            trained = _train(pods, shards, data, asked | {"claim": claim, "output": output, "rules": gate})
            _judge(pods, trained, gate, {"signing": signing, "registry": registry})


def _train(pods: _Pods, shards: Any, data: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Train on the shards; returns the model's manifest."""
    given = {"default_image": COMPONENT_IMAGE, "run_id": _RUN_ID, **data, **asked}
    return pods.step(train(shards=shards, **given), waits=True).outputs["model"]


def _judge(pods: _Pods, model: Any, gate: str, publishing: dict[str, Any]) -> None:
    """Score the model, and publish it where it is good enough."""
    scored = pods.step(evaluate(model=model, rules=gate, credentials=pods.credentials))
    with dsl.If(scored.outputs["Output"] == "pass", name="passed"):
        exported = pods.step(export(model=model, run_id=_RUN_ID, credentials=pods.credentials, **publishing))
        kubernetes.use_secret_as_volume(exported, publishing["signing"], FOLDER, optional=True)


def _prepare(
    pods: _Pods, form: Form, source: str, data_version: str, partitions: int, data: dict[str, Any]
) -> Any:
    """Download and shard in one pod; returns the shards' manifest."""
    return pods.step(prepare(source=source, data_version=data_version, **data)).outputs["shards"]


def _share(
    pods: _Pods, form: Form, source: str, data_version: str, partitions: int, data: dict[str, Any]
) -> Any:
    """Download and shard, each in as many pods as there are partitions; returns the shards' manifest."""
    given = {"source": source, "data_version": data_version, **data}
    of_part = {name: data[name] for name in ("recipe", "overrides", "credentials")}
    planned = pods.step(plan(partitions=partitions, **given))
    with dsl.ParallelFor(planned.output, name="fetching", parallelism=form.parallelism) as part:
        fetched = pods.step(fetch(part=part, **of_part))
    raw = pods.step(download(parts=dsl.Collected(fetched.output), **given)).outputs["raw"]
    with dsl.ParallelFor(planned.output, name="writing", parallelism=form.parallelism) as part:
        written = pods.step(write(raw=raw, part=part, **data))
    return pods.step(shard(raw=raw, parts=dsl.Collected(written.output), **data)).outputs["shards"]


def pipeline(form: Form) -> Any:
    """Return the pipeline in one of its forms.

    A parameter is there where it means something. With a volume `claim` is required, and the data are
    kept there unless told otherwise.

    Args:
        form: what is fixed when the pipeline is compiled.

    Returns:
        kfp's pipeline, to be compiled.
    """
    every = {
        name: item
        for name, item in inspect.signature(train_detector).parameters.items()
        if item.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    without = {"claim": not form.volume, "partitions": not form.shared}
    without |= {name: bool(form.until) for name in _TRAINING}
    parameters = [item for name, item in every.items() if not without.get(name)]
    if form.volume:
        required = every["claim"].replace(default=inspect.Parameter.empty)
        changed = every["data_root"].replace(default=DATA_ROOT)
        rest = [item for item in parameters if item.name not in ("claim", "data_root")]
        parameters = [required, changed, *rest]

    def traced(*values: Any) -> None:
        names = [item.name for item in parameters]
        train_detector(**dict(zip(names, values, strict=True)), form=form)

    traced.__doc__ = train_detector.__doc__
    traced.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # All three: Kubeflow's own settings name an hour for each, and those of success and failure come first.
    ttls = [f"ttl_seconds_after_{end}" for end in ("finished", "success", "failure")]
    limits = {"active_deadline_seconds": form.deadline, **dict.fromkeys(ttls, form.ttl)}
    config = dsl.PipelineConfig(**{name: value for name, value in limits.items() if value})
    return dsl.pipeline(name=NAME, display_name="Train an object detector", pipeline_config=config)(traced)
