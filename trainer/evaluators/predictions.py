"""Creates, stores and reads predictions for a split.

Training has GPUs, but the step `evaluate` has none. So before training ends, its processes predict the scored
split with the best weights and with the baseline. Predictions are stored with a description of their inputs,
and `evaluate` uses them if its inputs match.

<run>/train/predictions.parquet            predictions of best.pt
<run>/train/baseline_predictions.parquet   predictions of the baseline, unless its evaluation has them
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

import torch

from trainer import storage
from trainer.base.errors import EvaluationError, KubedetError, MissingError
from trainer.config.schema import Config
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.data.tiles import tile_settings
from trainer.evaluation.inference import LoadedModel, predict_share
from trainer.evaluation.truth_and_predictions import Predictions, class_difference
from trainer.evaluators.baseline import Baseline, find_baseline
from trainer.export import loading
from trainer.launching.distributed import World, broadcast, gather, gather_on_main, process_group

T = TypeVar("T")
_LOG = logging.getLogger("evaluate")

PREDICTIONS, BASELINE_PREDICTIONS = "predictions.parquet", "baseline_predictions.parquet"
_ATTEMPTS = "prediction.json"
_MAX_ATTEMPTS = 3
"""Maximum number of attempts to predict: each attempt may be killed for lack of memory."""


def open_split(shards_uri: str, only: str) -> ShardDataset:
    """Open the split to be scored: `only`, or if that is empty, the test split, else the validation split."""
    try:
        sizes = read_index(shards_uri).samples
    except MissingError:
        raise EvaluationError(
            f"{shards_uri} is not a folder of shards: it has no index.json",
            fix="use the folder that the shard step wrote, <data root>/shards/<fingerprint>",
        ) from None
    for split in [only] if only else ["test", "val"]:
        if sizes.get(split):
            return ShardDataset(shards_uri, split)
    listed = ", ".join(f"{split} ({size} images)" for split, size in sizes.items()) or "none"
    missing = f"no images of the split {only}" if only else "neither a test nor a val split to score"
    raise EvaluationError(
        f"the shards {shards_uri} have {missing}",
        fix=f"their splits are: {listed}; add one to the source, set data.val_fraction above 0, or choose "
        "another evaluation.split",
    )


def load_model(uri: str, dataset: ShardDataset, world: World) -> LoadedModel:
    """Load a model; raise EvaluationError if that fails, or its classes differ from those of the data."""
    model = loading.load_model(uri, world.device)
    names = [category["name"] for category in model.categories]
    if difference := class_difference(dataset.index.class_names, names, "the data", "the model"):
        raise EvaluationError(
            f"the classes of the model {uri} are not those of the data: {difference}",
            fix="evaluate on shards with the classes of the training (data.classes)",
        )
    return model


def describe_inputs(model: LoadedModel, dataset: ShardDataset, config: Config) -> dict[str, str]:
    """Return the inputs that predictions depend on."""
    tile, overlap = tile_settings(model.config, config.evaluation.tile)
    return {
        "fingerprint": dataset.fingerprint,
        "split": dataset.split,
        "sha256": model.sha256,
        "tile": f"{tile} px, overlap {overlap:g}" if tile else "",
        "kubedet": version("kubedet"),
    }


def read_matching(uri: str, expected: dict[str, str]) -> Predictions | None:
    """Return stored predictions; None if they are missing, damaged, or of different inputs."""
    if not storage.exists(uri):
        return None
    try:
        predictions, stored = Predictions.read(uri)
    except EvaluationError as error:
        _LOG.warning(error.message)
        return None
    # Checkpoints of other programs have no hash.
    if not expected["sha256"] or any(stored.get(name, "") != value for name, value in expected.items()):
        return None
    _LOG.info("using the stored predictions in %s", uri)
    return predictions


def predict_rank_share(
    model: LoadedModel, dataset: ShardDataset, config: Config, world: World
) -> Predictions:
    """Predict this process's share of the images."""
    size, resize, fill = model.network_input
    changed = replace(config, loader=replace(config.loader, image_size=size, resize=resize, fill=fill))
    tile = tile_settings(model.config, config.evaluation.tile)
    return predict_share(model.predict, dataset, changed, world, reentrant=model.reentrant, tile=tile)


def load_or_predict(
    model: LoadedModel, dataset: ShardDataset, config: Config, world: World, uris: list[str]
) -> Predictions | None:
    """Read a model's predictions from one of `uris`, or predict now; return None except on rank 0."""
    found = None
    if world.is_main:
        expected = describe_inputs(model, dataset, config)
        found = next(filter(None, (read_matching(uri, expected) for uri in uris)), None)
    if broadcast(found is not None, world):
        return found
    where = "the CPU" if world.device.type == "cpu" else f"{world.size} GPUs"
    _LOG.info("predicting %d images on %s; progress shows the time left", len(dataset), where)
    shares = gather_on_main(predict_rank_share(model, dataset, config, world), world)
    return Predictions.join(shares) if world.is_main else None


def read_baseline(baseline: Baseline, dataset: ShardDataset) -> Predictions | None:
    """Return the predictions for these images from the baseline's evaluation; None if it has none."""
    earlier, images = baseline.summary, (dataset.fingerprint, dataset.split)
    if earlier and (earlier.fingerprint, earlier.split) == images and storage.exists(earlier.predictions):
        try:
            return Predictions.read(earlier.predictions, earlier.predictions_sha256)[0]
        except EvaluationError as error:
            _LOG.warning(error.message)
    return None


def predict_after_training(checkpoint: str, shards_uri: str, config: Config, data_root: str) -> None:
    """Predict the split to be scored with best.pt and the baseline, on all ranks, and store the predictions.

    Because training is complete, a failure is only logged; `evaluate` then predicts the split itself.
    """
    gc.collect()  # The training state may fill the GPU.
    torch.cuda.empty_cache()
    folder = storage.parent(checkpoint)

    def find_models() -> tuple[ShardDataset, dict[str, str]]:
        if world.is_main:
            _count_attempt(folder)
        dataset = open_split(shards_uri, config.evaluation.split)
        models = {checkpoint: PREDICTIONS}
        baseline = find_baseline(config, shards_uri, data_root)
        if baseline and read_baseline(baseline, dataset) is None:
            models[baseline.model] = BASELINE_PREDICTIONS
        return dataset, models

    with process_group() as world:
        try:
            dataset, models = _run_on_all_ranks(find_models, world)
            for uri, name in models.items():
                _store_predictions(uri, storage.join(folder, name), dataset, config, world)
            if world.is_main:
                storage.delete(storage.join(folder, _ATTEMPTS))
        except KubedetError as error:
            if world.is_main:
                _LOG.warning("the step `evaluate` will predict the split: %s", error.message)
        broadcast(None, world)  # A job of several pods ends when the first pod exits.


def _store_predictions(model_uri: str, uri: str, dataset: ShardDataset, config: Config, world: World) -> None:
    """Predict a split on all ranks and store the result, unless `uri` has these predictions."""

    def load() -> tuple[LoadedModel, dict[str, str], bool]:
        model = load_model(model_uri, dataset, world)
        expected = describe_inputs(model, dataset, config)
        is_stored = world.is_main and read_matching(uri, expected) is not None
        return model, expected, is_stored

    model, expected, is_stored = _run_on_all_ranks(load, world)
    # ONNX is skipped: it runs on the CPU while the GPUs would wait.
    if broadcast(is_stored, world) or model.kind not in ("checkpoint", "weights"):
        return
    share = _run_on_all_ranks(lambda: predict_rank_share(model, dataset, config, world), world)
    shares = gather_on_main(share, world)
    if world.is_main:
        Predictions.join(shares).write(uri, expected)
        _LOG.info("stored the predictions of %d images for the evaluation: %s", len(dataset), uri)


def _run_on_all_ranks(function: Callable[[], T], world: World) -> T:
    """Call a function that does not communicate; if it fails on one rank, raise an error on all ranks."""
    results: list[T] = []
    problem = ""
    try:
        results.append(function())
    except Exception as error:  # Any failure is tolerated, because training is complete.
        problem = error.message if isinstance(error, KubedetError) else f"{type(error).__name__}: {error}"
    if problems := [text for text in gather(problem, world) if text]:
        raise EvaluationError(problems[0])
    return results[0]


def _count_attempt(folder: str) -> None:
    """Count an attempt to predict; raise EvaluationError after too many unfinished attempts."""
    uri = storage.join(folder, _ATTEMPTS)
    attempts = storage.read_json(uri)["attempts"] if storage.exists(uri) else 0
    if attempts == _MAX_ATTEMPTS:
        raise EvaluationError(f"the processes of the training were stopped {attempts} times while predicting")
    storage.write_json(uri, {"attempts": attempts + 1})
