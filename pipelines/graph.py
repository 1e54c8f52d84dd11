"""The one pipeline: download, shard, train, evaluate, gate, export."""

from kfp import dsl

from components.download import download
from components.evaluate import evaluate
from components.export import export
from components.gate import gate as decide
from components.shard import shard
from components.train import train
from pipelines import NAME, TITLES


def _step(task: dsl.PipelineTask, *, cpu: str, memory: str, retries: int) -> dsl.PipelineTask:
    task.set_display_name(TITLES[task.name])
    # Requests, not limits: a step that needs more on a big set is slow then, not killed.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # A retried step finds what it had finished: shards, checkpoints.
    task.set_retry(num_retries=retries, backoff_duration="30s", backoff_factor=2)
    # Kubeflow's cache would answer for data that has changed at its source, or was deleted
    # under the data root. The steps themselves find finished work, by its fingerprint.
    task.set_caching_options(False)
    return task


@dsl.pipeline(name=NAME, display_name="Train an object detector")
def train_detector(
    data_root: str,
    source: str = "sample",
    recipe: str = "debug",
    overrides: dict = {},  # noqa: B006 (kfp copies it into the compiled file)
    nodes: int = 1,
    nproc: int = 2,
    launcher: str = "local",
    output: str = "",
    gate: str = "",
) -> None:
    """Train a detector on a source of images, score it, and export it if it is good enough.

    Args:
        data_root: URI under which data is kept; every step must reach it.
        source: `sample`, `coco:PATH`, `voc:PATH` or a URI.
        recipe: name of a whole configuration; `kubedet recipes` lists them.
        overrides: dotted configuration keys and their values, e.g. {"train.epochs": 10}.
        nodes: machines that train.
        nproc: training processes on each machine.
        launcher: what starts the training processes: `local`.
        output: URI of the run's folder; empty is `<data_root>/runs/<run id>`.
        gate: `metric >= number`, parted by commas, to be met for an export; empty
            takes the recipe's.
    """
    fetched = _step(
        download(source=source, recipe=recipe, overrides=overrides, data_root=data_root),
        cpu="2", memory="4Gi", retries=2,
    )  # fmt: skip
    sharded = _step(
        shard(raw=fetched.outputs["raw"], recipe=recipe, overrides=overrides, data_root=data_root),
        cpu="4", memory="8Gi", retries=2,
    )  # fmt: skip
    trained = _step(
        train(
            shards=sharded.outputs["shards"], recipe=recipe, overrides=overrides, nodes=nodes, nproc=nproc,
            launcher=launcher, data_root=data_root, output=output, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        ),
        cpu="4", memory="16Gi", retries=3,
    )  # fmt: skip
    scored = _step(evaluate(model=trained.outputs["model"]), cpu="4", memory="8Gi", retries=1)
    decided = _step(
        decide(model=trained.outputs["model"], metrics=scored.outputs["metrics"], rules=gate),
        cpu="1", memory="2Gi", retries=1,
    )  # fmt: skip
    with dsl.If(decided.outputs["Output"] == "pass", name="passed"):
        _step(export(model=trained.outputs["model"]), cpu="2", memory="8Gi", retries=1)
