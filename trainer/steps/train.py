"""The step `train`: determine the configuration of a run, and train with it."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from trainer import storage
from trainer.base.errors import EXIT_RETRY, ConfigError, DamagedError, Interrupted, LaunchError
from trainer.config import parsing
from trainer.config.schema import MINUTES, Config, ModelConfig
from trainer.config.types import Overrides
from trainer.data.sample_order import global_batch_size
from trainer.data.shard_folder import read_index
from trainer.evaluation import gate
from trainer.export import published_models
from trainer.model import recipes
from trainer.steps import records, starting_weights
from trainer.steps.manifests import Shards, TrainedModel
from trainer.weights.weights_mirror import check_available

logger = logging.getLogger(__name__)

_DEBUG_MINUTES = 2.0  # Limit of the recipe debug in pods; starting a dozen pods takes about as long.


def train(
    shards: Shards,
    output: str,
    launch: Callable[[], None],
    *,
    processes: tuple[int, int],
    rules: str = "",
    warm_start: str = "",
    run_id: str = "",
    image: str = "",
    in_pods: bool = False,
) -> TrainedModel:
    """Train or resume a run to its end; user errors are raised before anything is launched.

    Args:
        shards: the data.
        output: URI of the run folder, which receives config.json and train/.
        launch: runs `python -m trainer` with `worker_arguments` in all processes, and waits for them.
        processes: the minimum and maximum number of processes, which differ in an elastic job.
        rules: rules of the gate, checked before training; if empty, the rules of the recipe apply.
        warm_start: empty, or `starting_weights.CHAMPION`; a resumed run keeps its weights.
        run_id: id of the run, for its record.
        image: container image of the training, for the record; may be empty.
        in_pods: whether the processes run in pods, where the time limits of recipes do not apply.
    """
    config = configure(shards, output, warm_start)
    if in_pods and MINUTES not in shards.overrides:
        # The limits of recipes are for one machine. A quick run should end within five minutes in pods, too.
        minutes = min(config.train.minutes, _DEBUG_MINUTES) if shards.recipe == "debug" else 0.0
        config = parsing.with_overrides(config, {MINUTES: minutes})
    config = check_and_complete(config, shards, rules, processes)
    parsing.write(_config_uri(output), config)
    weights, overrides = config.model.weights, shards.overrides
    records.record_run(shards, output, run_id=run_id, image=image, weights=weights, overrides=overrides)
    launch()
    return read_result(shards, output)


def run_folder(output: str, shards: Shards, run_id: str) -> str:
    """Return the URI of the run folder: `output`, or `<data root>/runs/<run id>`."""
    if "[[" in output:  # Otherwise all scheduled runs would share one folder, and only the first would train.
        raise ConfigError(
            f"the output {output} contains a macro that this cluster does not support",
            fix="leave the output empty: every run then has its own folder",
        )
    return output or storage.join(shards.data_root, "runs", run_id)


def worker_arguments(shards: Shards, output: str) -> tuple[str, ...]:
    """Return the arguments of `python -m trainer` in each process of the training."""
    return (
        "train",
        "--predict",
        "--config",
        _config_uri(output),
        "--data-root",
        shards.data_root,
        "--shards",
        shards.uri,
        "--output",
        storage.join(output, "train"),
    )


def train_on_this_machine(
    shards: Shards, output: str, nproc: int, rules: str = "", warm_start: str = "", run_id: str = ""
) -> TrainedModel:
    """Train with `nproc` local processes under torchrun's agent in this process. See `train`."""

    def launch() -> None:
        from trainer.launching.launch import launch

        code = launch(list(worker_arguments(shards, output)), ["--nproc-per-node", str(nproc)])
        if code == EXIT_RETRY:
            raise Interrupted("the training was stopped", fix="run the same command again to continue")
        if code:  # The launcher has reported the reason.
            raise SystemExit(code)

    return train(
        shards, output, launch, processes=(nproc, nproc), rules=rules, warm_start=warm_start, run_id=run_id
    )


def configure(shards: Shards, output: str, warm_start: str = "") -> Config:
    """Return the configuration: the recipe, overrides, and options that the initial weights determine."""
    uri, recipe, overrides = _config_uri(output), shards.recipe, shards.overrides
    begun = storage.exists(uri)
    if warm_start and begun:
        return parsing.read(uri)
    starting_weights.check_warm_start(warm_start)
    if warm_start:
        name = published_models.resolve_name(recipes.load(recipe, overrides).export.name, shards.uri)
        overrides = starting_weights.warm_start_overrides(recipe, overrides, shards.data_root, name)
    model = recipes.load(recipe, overrides).model
    implied = _stored_model_options(uri, model) if begun and model.weights else None
    if implied is None:
        implied = starting_weights.overrides_from_weights(recipe, overrides, shards.data_root)
        if implied:
            shown = ", ".join(f"{key}={value}" for key, value in implied.items())
            logger.info("from the weights: %s", shown)
    config = recipes.load(recipe, implied | overrides)
    if not begun:
        check_available(config.model.weights, shards.data_root)
    return config


def _stored_model_options(uri: str, model: ModelConfig) -> Overrides | None:
    """Return the stored model options of a run, or None if they belong to other weights or are damaged.

    The weights may have been deleted when the run is resumed.
    """
    try:
        stored = parsing.read(uri).model
    except DamagedError:
        return None
    if (stored.architecture, stored.weights) != (model.architecture, model.weights):
        return None
    return {f"model.{name}": value for name, value in asdict(stored).items()}


def check_and_complete(config: Config, shards: Shards, rules: str, processes: tuple[int, int]) -> Config:
    """Check the configuration against the data; return it with the model's name and the global batch."""
    index = read_index(shards.uri)
    gate.check_rules(gate.split_rules(rules) or config.evaluation.gate, index.class_names)
    name = published_models.resolve_name(config.export.name, shards.uri)
    published_models.check_classes(
        shards.data_root,
        name,
        index.class_names,
        other_classes=config.export.other_classes,
        fix=published_models.RENAME_FIX,
    )
    # The loader checks this too, but hundreds of processes take minutes to reach it.
    images, batch_size = index.samples.get("train", 0), config.train.batch_size
    batch_of = partial(global_batch_size, images, batch_size=batch_size)
    minimum, maximum = processes
    batch = batch_of(processes=minimum, configured=config.train.global_batch)
    batch_of(processes=maximum, configured=batch)  # An elastic job keeps its global batch.
    return parsing.with_overrides(config, {"export.name": name, "train.global_batch": batch})


def read_result(shards: Shards, output: str) -> TrainedModel:
    """Return the manifest of a finished training run; raises LaunchError if the run has no result."""
    report = result_uri(output)
    if not storage.exists(report):
        raise LaunchError(
            f"the training ended without a result at {report}",
            fix="check its log; on several machines the output must be on shared storage",
        )
    return TrainedModel(
        data_root=shards.data_root,
        output=output,
        shards=shards.uri,
        metrics=storage.read_json(report)["metrics"],
    )


def result_uri(output: str) -> str:
    """Return the URI of the file that a training run writes last."""
    return storage.join(output, "train", "result.json")


def _config_uri(output: str) -> str:
    return storage.join(output, "config.json")
