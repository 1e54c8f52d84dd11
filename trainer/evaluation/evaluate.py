"""Score a checkpoint on a split and write what people and machines read of it."""

import logging
import platform
from typing import Any

import torch
import torchvision

from trainer import checkpoint, storage
from trainer.config import Config
from trainer.data.shard_index import ShardDataset
from trainer.distributed import World
from trainer.errors import EvaluationError
from trainer.evaluation import coco, gallery
from trainer.evaluation.gate import Verdict, decide
from trainer.evaluation.inference import predict_split
from trainer.evaluation.report import ReportData, write_report
from trainer.training_log import read_rows

_LOG = logging.getLogger("evaluate")


def evaluate(checkpoint_uri: str, shards_uri: str, output_uri: str, config: Config) -> dict[str, Any]:
    """Score a checkpoint on the test split, or on val where there is no test split.

    Args:
        checkpoint_uri: best.pt of a run (its metrics.jsonl beside it gives the curves).
        shards_uri: folder that the shard step wrote.
        output_uri: folder for metrics.json, predictions.parquet, table.txt, report.html, report.md.
        config: image size, precision, gate.

    Returns:
        The content of metrics.json: split, images, metrics (the 12 by name), per_class,
        checkpoint and fingerprint of the shards.

    Raises:
        EvaluationError: the checkpoint was trained for other classes, or there is nothing to score.
    """
    dataset = _dataset(shards_uri)
    detector, meta = checkpoint.load_model(checkpoint_uri)
    _check_classes(meta["categories"], dataset.categories, checkpoint_uri)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(rank=0, size=1, device=device)
    found = predict_split(detector.to(device), dataset, config, world)
    truth = dataset.annotations()
    result = coco.evaluate(truth, found, engine=config.evaluation.engine)
    summary = {
        "split": dataset.split,
        "images": len(dataset),
        "metrics": result.metrics,
        "per_class": result.per_class,
        "checkpoint": checkpoint_uri,
        "step": meta["step"],
        "fingerprint": dataset.fingerprint,
    }
    made_of = {"fingerprint": dataset.fingerprint, "checkpoint": checkpoint_uri, "split": dataset.split}
    found.write(storage.join(output_uri, f"predictions.{config.evaluation.predictions}"), made_of)
    storage.write_bytes(storage.join(output_uri, "table.txt"), coco.table(result).encode())
    data = ReportData(
        title=f"{config.recipe} on {dataset.split}",
        split=dataset.split,
        images=len(dataset),
        metrics=result.metrics,
        per_class=result.per_class,
        precision=result.precision,
        verdict=_verdict(result.metrics, config),
        training=read_rows(storage.parent(checkpoint_uri)),
        gallery=gallery.worst_images(truth, found.take(found.scores >= gallery.SCORE).to_coco()),
        load_image=_image_loader(dataset),
        dataset={
            name: {"images": split["samples"], "boxes": split["boxes"]}
            for name, split in dataset.splits.items()
        },
        trained_boxes=dataset.class_counts.get("train", {}),
        config=meta["config"],
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "shards": dataset.fingerprint,
            "checkpoint": f"{checkpoint_uri} (step {meta['step']})",
        },
    )
    write_report(data, storage.join(output_uri, "report.html"), storage.join(output_uri, "report.md"))
    # Last: whoever finds it finds the rest.
    storage.write_json(storage.join(output_uri, "metrics.json"), summary)
    return summary


def _dataset(shards_uri: str) -> ShardDataset:
    index = storage.read_json(storage.join(shards_uri, "index.json"))
    for split in ("test", "val"):
        if index["splits"].get(split, {}).get("samples"):
            return ShardDataset(shards_uri, split)
    raise EvaluationError(
        f"the shards {shards_uri} have neither a test nor a val split to score",
        fix="give the source one, or set data.val_fraction above 0",
    )


def _check_classes(trained: list[dict[str, Any]], given: list[dict[str, Any]], uri: str) -> None:
    names, known = [c["name"] for c in given], [c["name"] for c in trained]
    if names != known:
        differing = sorted(set(names) ^ set(known)) or ["the same names in another order"]
        raise EvaluationError(
            f"the model {uri} has {len(known)} classes and the data {len(names)}; "
            f"they differ in: {', '.join(differing[:10])}",
            fix="evaluate on shards made with the classes of the training (data.classes)",
        )


def _verdict(metrics: dict[str, float], config: Config) -> Verdict | None:
    return decide(metrics, config.evaluation.gate) if config.evaluation.gate else None


def _image_loader(dataset: ShardDataset) -> Any:
    rows = {int(image_id): row for row, image_id in enumerate(dataset.image_ids)}
    return lambda image_id: dataset.read(rows[image_id])[0]
