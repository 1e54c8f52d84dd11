"""The work of the train step: describe the job, run it by a launcher, and return its result."""

from contextlib import nullcontext
from functools import partial
from typing import Any

from components import (
    container_digests,
    data_versions,
    jobs,
    launchers,
    records,
    run_ids,
    run_plan,
    starting_weights,
    usage,
)
from components.jobs import Request
from components.launchers.spec import JobSpec, with_heartbeat
from components.warm_start import overrides_from as from_champion
from trainer import storage
from trainer.base.errors import ConfigError, LaunchError
from trainer.config import parsing
from trainer.config.parsing import with_overrides
from trainer.config.schema import Config
from trainer.data.sample_order import global_batch
from trainer.data.shard_folder import ShardIndex, read_index
from trainer.data.shard_index import data_root_of
from trainer.evaluation.gate import check, split_rules
from trainer.export import published_models
from trainer.launching import heartbeat
from trainer.model import recipes
from trainer.weights.weights_mirror import check_available


def folder_of(output: str, data_root: str, data: dict[str, Any], run_id: str) -> str:
    """Return the URI of the run's folder.

    Args:
        output: what the run asks for; empty is `<data_root>/runs/<data version>-<run id>`.
        data_root: see `trainer.data.download.download`.
        data: manifest of the shards.
        run_id: the run's id.

    Raises:
        ConfigError: the output holds a macro of Kubeflow's that stands for nothing here.
    """
    if "[[" in output:  # Every scheduled run would go on with the first one's finished training.
        raise ConfigError(
            f"the output {output} holds a macro that this cluster does not replace",
            fix="leave the output empty: every run then has a folder of its own",
        )
    return output or storage.join(data_root, "runs", data_versions.run_name(data, run_id))


def prepare(
    shards: str,
    output: str,
    recipe: str,
    overrides: dict[str, Any],
    request: Request,
    *,
    rules: str = "",
    warm_start: str = "",
) -> JobSpec:
    """Write the run's one configuration file and describe the job that trains by it.

    Args:
        shards: URI of the shards' folder.
        output: URI of the run's folder, which receives config.json and train/.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        request: what the run asks of the launcher.
        rules: of the gate, parted by commas; empty takes the recipe's. Nobody should learn after a
            training of days that they name a class that there is not.
        warm_start: see `components.warm_start.overrides_from`. A run that was begun goes on with what it
            began with, whatever version is current now.

    Raises:
        ConfigError: no such recipe or key, a value that does not fit, a job that cannot be, a folder
            that its pods would not find, or other classes than the model of this name has.
        DataError: there are fewer images than one step of all processes reads.
        EvaluationError: the gate's rules cannot be used with these data.
        StorageError: the pretrained weights are not there and cannot be fetched.
    """
    begun = storage.exists(storage.join(output, "config.json"))
    data_root = data_root_of(shards)
    if warm_start and begun:
        config = parsing.read(storage.join(output, "config.json"))
    else:
        if warm_start:
            name = published_models.name_for(recipes.load(recipe, overrides).export.name, shards)
            overrides, _ = from_champion(warm_start, recipe, overrides, data_root, name)
        config = _with_weights(recipe, overrides, data_root, output)
    if not begun:  # A run that was begun has its own weights.
        check_available(config.model.weights, data_root_of(shards))
    uri = storage.join(output, "config.json")
    arguments = ("train", "--config", uri, "--shards", shards, "--output", storage.join(output, "train"))
    job = request.spec(arguments)
    if launchers.entry(request.launcher).pods:
        job = with_heartbeat(job, _heartbeat(output))
        _check_reach(job, {"data_root": shards, "output": output})
    index = read_index(shards)
    check(split_rules(rules) or config.evaluation.gate, index.names)
    config = _named(config, shards, index.names)
    if not launchers.entry(request.launcher).pods:
        config = _planned(config, overrides, index, output, job.processes)
    config = _with_global_batch(config, job, index.samples.get("train", 0))
    parsing.write(uri, config)
    return job


def _with_weights(recipe: str, overrides: dict[str, Any], data_root: str, output: str) -> Config:
    """Return the recipe with the overrides, and with what follows from the weights that it starts from."""
    config = recipes.load(recipe, overrides)
    if recipe not in recipes.WITH_WEIGHTS:
        return config
    network = {key: overrides[key] for key in starting_weights.NETWORK if key in overrides}

    def choose() -> dict[str, Any]:
        values = starting_weights.chosen(recipe, overrides, data_root)
        if values:
            print("starts from weights: " + ", ".join(f"{key}={value}" for key, value in values.items()))
        return {"chosen": values}

    plan = run_plan.kept(output, "weights", {"recipe": recipe, "network": network}, choose)
    values = {key: value for key, value in plan.get("chosen", {}).items() if key not in overrides}
    return recipes.load(recipe, overrides | values)


def _named(config: Config, shards: str, classes: list[str]) -> Config:
    """Name the model after its data where nobody does; refuse classes that it could not be published with."""
    name = published_models.name_for(config.export.name, shards)
    # The shards are <data_root>/shards/<fingerprint>.
    data_root = storage.parent(storage.parent(shards))
    published_models.check_classes(
        data_root, name, classes, other_classes=config.export.other_classes, fix=published_models.ANOTHER_NAME
    )
    return with_overrides(config, {"export.name": name})


def _planned(
    config: Config, overrides: dict[str, Any], index: ShardIndex, output: str, processes: int
) -> Config:
    """Choose what follows from the number of images and the speed, where the training runs here."""
    if not config.train.minutes:
        return config
    from trainer.training.machine_speed import measure  # PyTorch, which takes seconds to start.

    images = run_plan.Images(**{split: index.samples.get(split, 0) for split in ("train", "val", "test")})
    speed = partial(measure, classes=len(index.categories), processes=processes)
    return run_plan.planned(config, overrides, images, processes, output, speed)


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


def _check_reach(job: JobSpec, folders: dict[str, str]) -> None:
    """Refuse folders in the step's own pod, which the training's pods cannot read."""
    paths = [mount.path + "/" for mount in job.mounts]
    unreachable = [
        f"  {what}: {uri}"
        for what, uri in folders.items()
        if storage.is_local(uri) and not f"{storage.absolute(uri)}/".startswith(tuple(paths))
    ]
    if unreachable:
        raise ConfigError(
            "the training's pods would not find these folders:\n" + "\n".join(unreachable),
            fix="use a bucket, or a path below the volume of the run (claim) or of the job (mounts)",
        )


def train(
    data: dict[str, Any],
    output: str,
    data_root: str,
    recipe: str,
    overrides: dict[str, Any],
    parameters: dict[str, Any],
    job: dict[str, Any],
    placed: tuple[list[dict[str, Any]] | None, dict[str, str] | None],
    rules: str,
    warm_start: str = "",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train to the end, resuming a training that was started before.

    Args:
        data: manifest of the shards.
        output: see `folder_of`.
        data_root: see `folder_of`.
        recipe: see `prepare`.
        overrides: see `prepare`.
        parameters: what the run asks of the launcher, see `Request.of`.
        job: further fields of JobSpec.
        placed: tolerations and node selector of the task, see `jobs.placed`.
        rules: see `prepare`.
        warm_start: see `prepare`.

    Returns:
        The manifest of the trained model, and what is shown with it.

    Raises:
        KubedetError: as `prepare`, `launchers.run` and `result` raise them.
    """
    usage_folder = usage.place(data_root, run_ids.current()) if run_ids.current() else ""
    request = Request.of(parameters, job=jobs.placed(job, *placed), usage=usage_folder)
    in_pods = launchers.entry(request.launcher).pods
    usage.keep(data_root, processes=0 if in_pods else request.processes, nodes=0 if in_pods else 1)
    folder = folder_of(output, data_root, data, request.run_id)
    # First of all: a job of an earlier attempt waits for it.
    with heartbeat.renewed(_heartbeat(folder)) if in_pods else nullcontext():
        spec = prepare(data["uri"], folder, recipe, overrides, request, rules=rules, warm_start=warm_start)
        weights = parsing.read(storage.join(folder, "config.json")).model.weights
        records.run_began(data_root, folder, request.run_id, data, recipe, overrides, weights)
        images = container_digests.Images(data_root, records.name_of(folder))
        images.look_at_own()
        launchers.run(request.launcher, spec, images.look)
    if in_pods and spec.restart_policy == "OnFailure" and not storage.exists(_report(folder)):
        launchers.remove(request.launcher, spec.name, finished=True)
        raise LaunchError(f"the job {spec.name} ended before its training was complete", passing=True)
    trained = result(data["uri"], folder) | data_versions.label(data)
    place = {"uri": trained["output"], "checkpoint": trained["checkpoint"]}
    return trained, place | trained["metrics"] | data_versions.label(data)


def _heartbeat(output: str) -> str:
    return storage.join(output, "launcher.json")


def _report(output: str) -> str:
    return storage.join(output, "train", "result.json")


def result(shards: str, output: str) -> dict[str, Any]:
    """Return the manifest of the trained model: where it is, what it was made from, how good it is.

    Raises:
        LaunchError: the training ended well but left no checkpoint.
    """
    report = _report(output)
    if not storage.exists(report):
        raise LaunchError(
            f"the training ended without a result at {report}",
            fix="look at its log; on several machines the output must be a place that all of them share",
        )
    return {
        "kind": "model",
        "version": 1,
        "output": output,
        "config": storage.join(output, "config.json"),
        "shards": shards,
        "checkpoint": storage.join(output, "train", "best.pt"),
        **storage.read_json(report),
    }
