"""Compare the test AP of kubedet's training step and of torchvision's losses, over several seeds.

    python -m benchmarks.accuracy                                                  # the built-in sample
    python -m benchmarks.accuracy --source voc:PATH --recipe small --epochs 45     # another dataset

Both train the same network from the same weights on the same batches: `stock` with torchvision's losses,
image by image in fp32; `ours` as the recipe does (bf16, fused, compiled). `ratio` is the mean AP of `ours`
over that of `stock`, `noise` the standard error of the difference. `--first-seed` splits the seeds over runs.
"""

import dataclasses
import logging
import statistics
import tempfile
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchvision.models import detection

from benchmarks.common import arguments, report
from trainer.config.schema import Config
from trainer.data.batch import PADDING
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.evaluation.coco import evaluate
from trainer.evaluation.inference import predict_split
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.retinanet import RetinaNet
from trainer.training import checkpoint
from trainer.training.loop import train

_LOG = logging.getLogger("accuracy")
METRICS = ("coco/AP", "coco/AP50")


class StockDetector(RetinaNet):
    """The same network with torchvision's losses."""

    def __init__(self, config: RetinaNetOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        # In a tuple, so that the weights are not registered twice.
        self._stock = (
            detection.RetinaNet(
                self.backbone, num_classes, head=self.head, anchor_generator=self.anchor_generator
            ),
        )
        self.head.regression_head._loss_type = self.box_loss

    def forward(
        self,
        images: Tensor,
        boxes: Tensor,
        labels: Tensor,
        color: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses of a batch, like `RetinaNet.forward`."""
        features = self.features(self.normalize(images, color))
        shapes = [(level.shape[-2], level.shape[-1]) for level in features]
        anchors = torch.cat(self.anchors(shapes, images.shape[-1]))
        targets = [
            {"boxes": rows[names != PADDING], "labels": names[names != PADDING]}
            for rows, names in zip(boxes, labels, strict=True)
        ]
        losses = self._stock[0].compute_loss(targets, self.head(features), [anchors] * len(images))
        return {"classification": losses["classification"], "boxes": losses["bbox_regression"]}


def run(config: Config, shards: str, output: str, device: torch.device, *, stock: bool) -> dict[str, float]:
    """Train once; return the test scores of the best checkpoint."""
    kind = StockDetector if stock else RetinaNet
    with mock.patch("trainer.training.state.build", kind):
        result = train(config, shards, output)
    detector, _ = checkpoint.load_model(result["checkpoint"], device)
    test = ShardDataset(shards, "test")
    predictions = predict_split(detector.predict, test, config, World(0, 1, device))
    metrics = evaluate(test.annotations(), predictions).metrics
    return {name: metrics[name] for name in METRICS}


def main() -> None:
    """Train with every seed and both losses in turn, and print the scores."""
    options = arguments(
        __doc__, trains=True, source="sample", recipe="debug", epochs=20, seeds=3, first_seed=0
    )
    config = recipes.load(options.recipe, {"train.epochs": options.epochs})
    scores: dict[str, list[dict[str, float]]] = {"stock": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        shards = shard(download(options.source, folder, config.data), folder, config.data).uri
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for seed in seeds:
            for name, changes in (
                ("stock", {"precision": "fp32", "compile": "off"}),
                ("ours", {"precision": "bf16", "compile": "loss" if options.compiled else "off"}),
            ):
                changed = dataclasses.replace(config.train, seed=seed, **changes)
                seeded = dataclasses.replace(config, train=changed)
                output = f"{folder}/{name}-{seed}"
                scores[name].append(run(seeded, shards, output, options.device, stock=name == "stock"))
                _LOG.info("%s, seed %d: %s", name, seed, scores[name][-1])
    figures = _figures(scores, seeds)
    if not figures["stock_AP"]:
        raise SystemExit("error: training with torchvision's losses reached AP 0: raise --epochs")
    report("accuracy", figures["ours_AP"] / figures["stock_AP"], figures, options)


def _figures(scores: dict[str, list[dict[str, float]]], seeds: range) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for metric in METRICS:
        short = metric.removeprefix("coco/")
        columns = {name: [row[metric] for row in rows] for name, rows in scores.items()}
        for name, values in columns.items():
            figures[f"{name}_{short}"] = statistics.mean(values)
            for seed, value in zip(seeds, values, strict=True):
                figures[f"{name}_{short}_seed{seed}"] = value
        if len(columns["ours"]) > 1:
            errors = [statistics.variance(values) / len(values) for values in columns.values()]
            figures[f"noise_{short}"] = sum(errors) ** 0.5
    return figures


if __name__ == "__main__":
    main()
