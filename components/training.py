"""The work of the train step: describe the job, run it by a launcher, and return its result."""

import logging
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from components import data_versions, jobs, launchers, records, starting_weights
from components.jobs import Request
from components.launchers.spec import JobSpec, with_heartbeat
from trainer import storage
from trainer.base.errors import ConfigError, DamagedError, LaunchError
from trainer.config import parsing
from trainer.config.schema import MINUTES, ModelConfig
from trainer.config.types import Overrides
from trainer.data.sample_order import global_batch
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import data_root_of
from trainer.evaluation.gate import check, split_rules
from trainer.export import published_models
from trainer.launching import heartbeat
from trainer.model import recipes
from trainer.weights.weights_mirror import check_available

logger = logging.getLogger(__name__)

_HEARTBEAT = "launcher.json"
_DEBUG_MINUTES = 2.0  # Limit of the recipe debug in pods; starting a dozen pods takes about as long.


def train(
    data: dict[str, Any],
    output: str,
    data_root: str,
    recipe: str,
    overrides: Overrides,
    parameters: dict[str, Any],
    job: dict[str, Any],
    placed: tuple[list[dict[str, Any]] | None, dict[str, str] | None],
    rules: str,
    warm_start: str = "",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train to the end, or resume; return the manifest of the trained model, and what is shown with it.

    `data` is the manifest of the shards, `output` see `folder_of`, `parameters` see `Request.of`, `job` has
    further fields of JobSpec, `placed` tolerations and node selector of the task; for `rules` and
    `warm_start` see `prepare`.
    """
    request = Request.of(parameters, job=jobs.placed(job, *placed))
    in_pods = launchers.entry(request.launcher).pods
    folder = folder_of(output, data_root, data, request.run_id)
    # Before anything else: a job of an earlier attempt waits for the heartbeat.
    with heartbeat.renewed(storage.join(folder, _HEARTBEAT)) if in_pods else nullcontext():
        spec = prepare(data["uri"], folder, recipe, overrides, request, rules=rules, warm_start=warm_start)
        config = storage.join(folder, "config.json")
        weights = parsing.read(config).model.weights
        records.record_run(data_root, folder, request.run_id, data, recipe, overrides, weights)
        launchers.run(request.launcher, spec)
    report = storage.join(folder, "train", "result.json")
    if not storage.exists(report):
        if in_pods and spec.restart_policy == "OnFailure":
            launchers.remove(request.launcher, spec.name, finished=True)
            raise LaunchError(f"the job {spec.name} ended before the training was complete", transient=True)
        raise LaunchError(
            f"the training ended without a result at {report}",
            fix="check its log; on several machines the output must be on shared storage",
        )
    result = storage.read_json(report)
    checkpoint, label = storage.join(folder, "train", "best.pt"), data_versions.label(data)
    trained = {
        "kind": "model",
        "version": 1,
        "output": folder,
        "config": config,
        "shards": data["uri"],
        "checkpoint": checkpoint,
        **result,
    }
    return trained | label, {"uri": folder, "checkpoint": checkpoint} | result["metrics"] | label


def folder_of(output: str, data_root: str, data: dict[str, Any], run_id: str) -> str:
    """Return the URI of the run's folder: `output`, or `<data_root>/runs/<data version>-<run id>`."""
    if "[[" in output:  # Every scheduled run would resume the first one's finished training.
        raise ConfigError(
            f"the output {output} contains a macro that this cluster does not support",
            fix="leave the output empty: every run then has its own folder",
        )
    name = "-".join([*data_versions.label(data).values(), run_id])
    return output or storage.join(data_root, "runs", name)


def prepare(
    shards: str,
    output: str,
    recipe: str,
    overrides: Overrides,
    request: Request,
    *,
    rules: str = "",
    warm_start: str = "",
) -> JobSpec:
    """Write the run's configuration file and return the job that trains with it.

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
        model = recipes.load(recipe, overrides).model
        implied = _stored_network(uri, model) if begun and model.weights else None
        if implied is None:
            implied = starting_weights.implied(recipe, overrides, data_root)
            if implied:
                print("from the weights: " + ", ".join(f"{key}={value}" for key, value in implied.items()))
        config = recipes.load(recipe, implied | overrides)
    if not begun:
        check_available(config.model.weights, data_root)
    arguments = ("train", "--config", uri, "--shards", shards, "--output", storage.join(output, "train"))
    job = request.spec(arguments)
    if in_pods:
        job = with_heartbeat(job, storage.join(output, _HEARTBEAT))
        mounted = tuple(mount.path + "/" for mount in job.mounts)
        folders = {"data_root": shards, "output": output}
        lost = [
            f"  {name}: {folder}"
            for name, folder in folders.items()
            if storage.is_local(folder) and not f"{storage.absolute(folder)}/".startswith(mounted)
        ]
        if lost:
            raise ConfigError(
                "the training pods cannot access these folders:\n" + "\n".join(lost),
                fix="use a bucket, or a path below the volume of the run (claim) or of the job (mounts)",
            )
    index = read_index(shards)
    check(split_rules(rules) or config.evaluation.gate, index.names)
    name = published_models.name_for(config.export.name, shards)
    published_models.check_classes(
        data_root,
        name,
        index.names,
        other_classes=config.export.other_classes,
        fix=published_models.RENAME_FIX,
    )
    config = parsing.with_overrides(config, {"export.name": name})
    if in_pods and MINUTES not in overrides:
        # The limits of recipes are for one machine. A first look shall end within five minutes here, too.
        minutes = min(config.train.minutes, _DEBUG_MINUTES) if recipe == "debug" else 0.0
        config = parsing.with_overrides(config, {MINUTES: minutes})
    # Checked here as well as in the loader: hundreds of processes need minutes to come that far.
    of_step = partial(
        global_batch,
        index.samples.get("train", 0),
        batch_size=config.train.batch_size,
        accumulate=config.train.accumulate,
    )
    batch = of_step(processes=job.nodes * job.processes, configured=config.train.global_batch)
    most = job.elastic.max_nodes if job.elastic else job.nodes
    of_step(processes=most * job.processes, configured=batch)  # An elastic job keeps its global batch.
    parsing.write(uri, parsing.with_overrides(config, {"train.global_batch": batch}))
    return job


def _stored_network(uri: str, model: ModelConfig) -> Overrides | None:
    """Return the options of a run's network, as stored for the same weights; None if they are unknown.

    The file of the weights may be gone when the run is resumed.
    """
    try:
        stored = parsing.read(uri).model
    except DamagedError:
        return None
    if (stored.architecture, stored.weights) != (model.architecture, model.weights):
        return None
    return {f"model.{name}": value for name, value in asdict(stored).items()}
