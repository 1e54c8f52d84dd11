"""The one pipeline: download, shard, train, evaluate, gate, export, and a clean-up at its end.

Download and sharding are shared by as many pods as there are partitions: `plan` divides the work,
`fetch` and `write` do a part each, `download` and `shard` put the parts together.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components.cleanup import cleanup
from components.download import download
from components.evaluate import evaluate
from components.export import export
from components.fetch import fetch
from components.gate import gate as decide
from components.images import COMPONENT_IMAGE
from components.jobs import VOLUME
from components.plan import plan
from components.register import register
from components.shard import shard
from components.signing import FOLDER, SIGNING
from components.stores import CREDENTIALS, SECRET_KEYS
from components.train import train
from components.write import write
from pipelines import NAME, OPTIONAL, SHARED, TITLES

DATA_ROOT = f"{VOLUME}/kubedet"
"""The data root of a pipeline with a volume, where nobody names another."""


@dataclass(frozen=True)
class _Pods:
    """What every step's pod is given. Each is a parameter of the pipeline, or empty."""

    credentials: Any
    claim: Any

    def step(self, task: dsl.PipelineTask, *, cpu: str, memory: str, retries: int) -> dsl.PipelineTask:
        _run(task, (TITLES | SHARED | OPTIONAL)[task.name], cpu, memory, retries)
        # Keys that are not in the Secret, or no such Secret, leave the variables unset.
        kubernetes.use_secret_as_env(task, self.credentials, SECRET_KEYS, optional=True)
        if self.claim:
            kubernetes.mount_pvc(task, self.claim, VOLUME)
        return task


def _run(task: dsl.PipelineTask, title: str, cpu: str, memory: str, retries: int) -> dsl.PipelineTask:
    task.set_display_name(title)
    # Requests, not limits: a step that needs more on a big set is slow then, not killed.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # A retried step finds what it had finished: shards, checkpoints, the training job.
    task.set_retry(num_retries=retries, backoff_duration="30s", backoff_factor=2)
    # Kubeflow's cache would answer for data that has changed at its source, or was deleted
    # under the data root. The steps themselves find finished work, by its fingerprint.
    return task.set_caching_options(False)


def train_detector(
    data_root: str,
    source: str = "sample",
    recipe: str = "debug",
    overrides: dict = {},  # noqa: B006 (kfp copies it into the compiled file)
    gate: str = "",
    launcher: str = "kubernetes",
    nodes: int = 1,
    nproc: int = 0,
    gpus: int = 0,
    image: str = "",
    job: dict = {},  # noqa: B006
    output: str = "",
    credentials: str = CREDENTIALS,
    claim: str = "",
    data_version: str = "",
    partitions: int = 1,
    signing: str = SIGNING,
    registry: str = "",
) -> None:
    """Train a detector on a source of images, score it, and export it if it is good enough.

    Args:
        data_root: URI under which data is kept; every step must reach it.
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a whole configuration; `kubedet recipes` lists them.
        overrides: dotted configuration keys and their values, e.g. {"train.epochs": 10}.
        gate: `metric >= number`, parted by commas, to be met for an export; empty
            takes the recipe's.
        launcher: what starts the training: `kubernetes` (a PyTorchJob) or `local` (processes
            in the step's own pod).
        nodes: machines that train.
        nproc: training processes on each machine; 0 is one for each GPU, or one.
        gpus: GPUs of each machine.
        image: container image of the training; empty is the steps' own.
        job: further fields of the training job, e.g. {"memory_limit": "64Gi"}; strict, see
            components/launchers/spec.py.
        output: URI of the run's folder; empty is `<data_root>/runs/<run>`.
        credentials: Secret with the object store's keys; none of them is required.
        claim: PersistentVolumeClaim that every pod mounts at /data.
        data_version: name for the data as they are now; a known one brings its data back.
        partitions: pods that share the download, and then the sharding; the result is the same.
        signing: Secret whose `private.pem` signs the exported model; the default one need not exist.
        registry: URL of the Kubeflow Model Registry that is told of the exported model; empty is none.
    """
    pods = _Pods(credentials, claim)
    ending = cleanup(launcher=launcher, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    _run(ending, "Clean up", cpu="100m", memory="256Mi", retries=2)
    with dsl.ExitHandler(ending, name="steps"):
        data = {"recipe": recipe, "overrides": overrides, "data_root": data_root}
        sharded = _prepare(pods, source, data_version, partitions, data)
        trained = pods.step(
            train(
                shards=sharded.outputs["shards"], recipe=recipe, overrides=overrides, launcher=launcher,
                nodes=nodes, nproc=nproc, gpus=gpus, image=image, default_image=COMPONENT_IMAGE, job=job,
                credentials=credentials, claim=claim, data_root=data_root, output=output,
                run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, rules=gate,
            ),
            cpu="1", memory="4Gi", retries=3,
        )  # fmt: skip
        scored = pods.step(
            evaluate(model=trained.outputs["model"], rules=gate), cpu="4", memory="8Gi", retries=1
        )
        decided = pods.step(
            decide(model=trained.outputs["model"], metrics=scored.outputs["metrics"], rules=gate),
            cpu="1", memory="2Gi", retries=1,
        )  # fmt: skip
        with dsl.If(decided.outputs["Output"] == "pass", name="passed"):
            _publish(pods, trained, signing, registry)


def _prepare(
    pods: _Pods, source: str, data_version: str, partitions: int, data: dict[str, Any]
) -> dsl.PipelineTask:
    """Download and shard, each in as many pods as there are partitions; returns the sharding's end."""
    planned = pods.step(
        plan(source=source, data_version=data_version, partitions=partitions, **data),
        cpu="1", memory="4Gi", retries=2,
    )  # fmt: skip
    with dsl.ParallelFor(planned.output, name="fetching") as part:
        fetched = pods.step(
            fetch(part=part, recipe=data["recipe"], overrides=data["overrides"]),
            cpu="2", memory="4Gi", retries=2,
        )  # fmt: skip
    raw = pods.step(
        download(source=source, data_version=data_version, parts=dsl.Collected(fetched.output), **data),
        cpu="1", memory="4Gi", retries=2,
    ).outputs["raw"]  # fmt: skip
    with dsl.ParallelFor(planned.output, name="writing") as part:
        written = pods.step(write(raw=raw, part=part, **data), cpu="4", memory="8Gi", retries=2)
    return pods.step(
        shard(raw=raw, parts=dsl.Collected(written.output), **data), cpu="1", memory="4Gi", retries=2
    )


def _publish(pods: _Pods, trained: dsl.PipelineTask, signing: str, registry: str) -> None:
    """Export the model, and tell a registry of it where there is one."""
    exported = pods.step(
        export(model=trained.outputs["model"], signing=signing), cpu="2", memory="8Gi", retries=1
    )
    kubernetes.use_secret_as_volume(exported, signing, FOLDER, optional=True)
    with dsl.If(registry != "", name="registered"):
        registering = register(
            exported=exported.outputs["exported"], server=registry,
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        )  # fmt: skip
        pods.step(registering, cpu="100m", memory="512Mi", retries=3)


def pipeline(*, volume: bool) -> Any:
    """Return the pipeline in one of its two forms.

    A pod mounts a volume or it does not: that is fixed when the pipeline is compiled, only the
    claim's name is not. So the form for a bucket has no parameter `claim`; the form for a
    volume requires it, and keeps its data there unless told otherwise.

    Args:
        volume: mount a volume in every step.

    Returns:
        kfp's pipeline, to be compiled.
    """
    every = inspect.signature(train_detector).parameters
    if volume:
        required = [every["claim"].replace(default=inspect.Parameter.empty)]
        changed = [every["data_root"].replace(default=DATA_ROOT)]
        rest = [item for name, item in every.items() if name not in ("claim", "data_root")]
        parameters = required + changed + rest
    else:
        parameters = [item for name, item in every.items() if name != "claim"]

    def form(*values: Any) -> None:
        names = [item.name for item in parameters]
        train_detector(**dict(zip(names, values, strict=True)))

    form.__doc__ = train_detector.__doc__
    form.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return dsl.pipeline(name=NAME, display_name="Train an object detector")(form)
