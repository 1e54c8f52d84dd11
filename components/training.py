"""The work of the train step: describe the job, run it by a launcher, and return its result."""

import logging
import os
from contextlib import nullcontext
from functools import partial
from typing import Any

from components import (
    auto_schedule,
    data_versions,
    environment,
    jobs,
    launchers,
    records,
    starting_weights,
    usage,
)
from components.jobs import Request
from components.launchers.backend import JobStatus
from components.launchers.spec import JobSpec, with_heartbeat
from components.records import ImagesRecord
from trainer import storage
from trainer.base.errors import ConfigError, KubedetError, LaunchError
from trainer.config import parsing
from trainer.config.parsing import with_overrides
from trainer.config.schema import Config
from trainer.config.types import Overrides
from trainer.data.sample_order import global_batch
from trainer.data.shard_folder import ShardIndex, read_index
from trainer.data.shard_index import data_root_of
from trainer.evaluation.gate import check, split_rules
from trainer.export import published_models
from trainer.launching import heartbeat
from trainer.model import recipes
from trainer.weights.weights_mirror import check_available

logger = logging.getLogger(__name__)


def train(
    data: dict[str, Any], output: str, data_root: str, recipe: str, overrides: Overrides,
    parameters: dict[str, Any], job: dict[str, Any],
    placed: tuple[list[dict[str, Any]] | None, dict[str, str] | None], rules: str, warm_start: str = "",
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Train to the end; resume a training that was started before.

    `data` is the manifest of the shards, `output` see `folder_of`, `parameters` see `Request.of`, `job` has
    further fields of JobSpec, `placed` tolerations and node selector of the task; for `rules` and
    `warm_start` see `prepare`.

    Returns:
        The manifest of the trained model, and what is shown with it.
    """
    usage_folder = usage.place(data_root, environment.run_id()) if environment.run_id() else ""
    request = Request.of(parameters, job=jobs.placed(job, *placed), usage=usage_folder)
    in_pods = launchers.entry(request.launcher).pods
    usage.keep(data_root, processes=0 if in_pods else request.processes, nodes=0 if in_pods else 1)
    folder = folder_of(output, data_root, data, request.run_id)
    # Before anything else: a job of an earlier attempt waits for the heartbeat.
    with heartbeat.renewed(_heartbeat(folder)) if in_pods else nullcontext():
        spec = prepare(data["uri"], folder, recipe, overrides, request, rules=rules, warm_start=warm_start)
        weights = parsing.read(storage.join(folder, "config.json")).model.weights
        records.record_run(data_root, folder, request.run_id, data, recipe, overrides, weights)
        images = Images(data_root, records.name_of(folder))
        images.note_own()
        launchers.run(request.launcher, spec, images.note_pods)
    if in_pods and spec.restart_policy == "OnFailure" and not storage.exists(_report(folder)):
        launchers.remove(request.launcher, spec.name, finished=True)
        raise LaunchError(f"the job {spec.name} ended before its training was complete", passing=True)
    trained = result(data["uri"], folder) | data_versions.label(data)
    place = {"uri": trained["output"], "checkpoint": trained["checkpoint"]}
    return trained, place | trained["metrics"] | data_versions.label(data)


def folder_of(output: str, data_root: str, data: dict[str, Any], run_id: str) -> str:
    """Return the URI of the run's folder: `output`, or `<data_root>/runs/<data version>-<run id>`."""
    if "[[" in output:  # Every scheduled run would resume the first one's finished training.
        raise ConfigError(
            f"the output {output} contains a macro that this cluster does not replace",
            fix="leave the output empty: every run then has its own folder",
        )
    name = "-".join([*data_versions.label(data).values(), run_id])
    return output or storage.join(data_root, "runs", name)


def prepare(
    shards: str, output: str, recipe: str, overrides: Overrides, request: Request, *,
    rules: str = "", warm_start: str = "",
) -> JobSpec:  # fmt: skip
    """Write the run's configuration file and return the job that trains by it.

    `shards` and `output` are URIs of folders; config.json and train/ are written into `output`. `rules` of
    the gate are checked before days of training; empty takes the recipe's. `warm_start` is empty or
    `starting_weights.CHAMPION`; a run that was started before keeps its weights.
    """
    uri, data_root = storage.join(output, "config.json"), data_root_of(shards)
    begun, in_pods = storage.exists(uri), launchers.entry(request.launcher).pods
    if warm_start and begun:
        config = parsing.read(uri)
    else:
        starting_weights.check_warm_start(warm_start)
        if warm_start:
            name = published_models.name_for(recipes.load(recipe, overrides).export.name, shards)
            overrides = starting_weights.from_champion(recipe, overrides, data_root, name)
        config = _with_weights(recipe, overrides, data_root, output)
    if not begun:
        check_available(config.model.weights, data_root)
    arguments = ("train", "--config", uri, "--shards", shards, "--output", storage.join(output, "train"))
    job = request.spec(arguments)
    if in_pods:
        job = with_heartbeat(job, _heartbeat(output))
        _check_mounts(job, {"data_root": shards, "output": output})
    index = read_index(shards)
    check(split_rules(rules) or config.evaluation.gate, index.names)
    name = published_models.name_for(config.export.name, shards)
    published_models.check_classes(
        data_root, name, index.names, other_classes=config.export.other_classes,
        fix=published_models.ANOTHER_NAME,
    )  # fmt: skip
    config = with_overrides(config, {"export.name": name})
    if config.train.minutes and not in_pods:
        config = _planned(config, overrides, index, output, job.processes)
    config = _with_global_batch(config, job, index.samples.get("train", 0))
    parsing.write(uri, config)
    return job


def _with_weights(recipe: str, overrides: Overrides, data_root: str, output: str) -> Config:
    """Return the recipe with the overrides, and the values that follow from its initial weights."""
    if recipe not in recipes.WITH_WEIGHTS:
        return recipes.load(recipe, overrides)
    network = {key: overrides[key] for key in starting_weights.NETWORK if key in overrides}

    def choose() -> dict[str, Any]:
        values = starting_weights.chosen(recipe, overrides, data_root)
        if values:
            print("starts from weights: " + ", ".join(f"{key}={value}" for key, value in values.items()))
        return {"chosen": values}

    plan = auto_schedule.kept(output, "weights", {"recipe": recipe, "network": network}, choose)
    return recipes.load(recipe, plan.get("chosen", {}) | overrides)


def _planned(config: Config, overrides: Overrides, index: ShardIndex, output: str, processes: int) -> Config:
    """Choose the settings that depend on the number of images and the speed of this machine."""
    from trainer.training.throughput_probe import measure  # PyTorch, which takes seconds to start.

    images = auto_schedule.Images(
        **{split: index.samples.get(split, 0) for split in ("train", "val", "test")}
    )
    speed = partial(measure, classes=len(index.categories), processes=processes)
    return auto_schedule.planned(config, overrides, images, processes, output, speed)


def _with_global_batch(config: Config, job: JobSpec, samples: int) -> Config:
    """Fix the global batch, which an elastic job keeps on any number of processes."""
    # Checked here as well as in the loader: hundreds of processes need minutes to come that far.
    of_step = partial(
        global_batch, samples, batch_size=config.train.batch_size, accumulate=config.train.accumulate
    )
    batch = of_step(processes=job.nodes * job.processes, configured=config.train.global_batch)
    most = job.elastic.max_nodes if job.elastic else job.nodes
    of_step(processes=most * job.processes, configured=batch)
    return with_overrides(config, {"train.global_batch": batch})


def _check_mounts(job: JobSpec, folders: dict[str, str]) -> None:
    """Refuse local folders that the training's pods do not mount."""
    paths = [mount.path + "/" for mount in job.mounts]
    unreachable = [
        f"  {name}: {uri}"
        for name, uri in folders.items()
        if storage.is_local(uri) and not f"{storage.absolute(uri)}/".startswith(tuple(paths))
    ]
    if unreachable:
        raise ConfigError(
            "the training's pods would not find these folders:\n" + "\n".join(unreachable),
            fix="use a bucket, or a path below the volume of the run (claim) or of the job (mounts)",
        )


def _heartbeat(output: str) -> str:
    return storage.join(output, "launcher.json")


def _report(output: str) -> str:
    return storage.join(output, "train", "result.json")


def result(shards: str, output: str) -> dict[str, Any]:
    """Return the manifest of the trained model."""
    report = _report(output)
    if not storage.exists(report):
        raise LaunchError(
            f"the training ended without a result at {report}",
            fix="look at its log; on several machines the output must be on storage that all of them share",
        )
    return {
        "kind": "model", "version": 1, "output": output, "config": storage.join(output, "config.json"),
        "shards": shards, "checkpoint": storage.join(output, "train", "best.pt"), **storage.read_json(report),
    }  # fmt: skip


class Images:
    """Records the images that a run really runs, as soon as they are seen.

    An image that cannot be read or recorded ends no training.
    """

    def __init__(self, data_root: str, run: str) -> None:
        self._data_root, self._seen = data_root, ImagesRecord(run)

    def note_own(self) -> None:
        """Record the image of this process's own pod, if it is in one and may read it."""
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            return
        from components.launchers.cluster import client, own_pod

        try:
            self._note(self._seen.step, {own_pod.read_image_id(client.connect())})
        except KubedetError as error:
            logger.info("the digest of this pod's image is not known: %s", error)

    def note_pods(self, status: JobStatus) -> None:
        """Record the images of a job's pods."""
        self._note(self._seen.training, {pod.image_id for pod in status.pods})

    def _note(self, seen: list[str], images: set[str]) -> None:
        new = images - {"", *seen}
        if not new:
            return
        seen.extend(new)  # Even if it cannot be written: no later status tries again.
        try:
            before = ImagesRecord.of_run(self._data_root, self._seen.run)
            step, training = {*before.step, *self._seen.step}, {*before.training, *self._seen.training}
            ImagesRecord(before.run, sorted(step), sorted(training)).write(self._data_root)
        except KubedetError as error:
            logger.warning("the digests of the images are not kept: %s", error.message)
