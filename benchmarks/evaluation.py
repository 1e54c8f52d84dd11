"""Evaluation: the COCO metrics against pycocotools, a split of Open Images' size, and inference.

    python -m benchmarks.evaluation                        # all; some ten minutes on two cores
    python -m benchmarks.evaluation --part metrics         # 5000 images x 80 classes x 100 detections
    python -m benchmarks.evaluation --part large           # 41,620 x 601, 4.16 million detections
    python -m benchmarks.evaluation --part inference --threads 2

`metrics` compares the twelve numbers as well. `large` runs in processes of their own, for their peak
memory: `evaluate` is the COCO metrics with all checks, `report` all that `kubedet evaluate` does after
inference, a comparison with a baseline included. `inference` is torchvision's reference loop (images one
by one, decoded by PIL, pycocotools fed image by image), with one thread, as its script sets it, and with
all; against ours on the same images and weights.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.transforms.functional import pil_to_tensor

from benchmarks.common import arguments, report, stock_model
from benchmarks.large_split import synthetic
from trainer import recipes
from trainer.config import Config
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.distributed import SINGLE
from trainer.evaluation import coco
from trainer.evaluation.inference import predict_split
from trainer.evaluation.tables import Truth
from trainer.model.detector import build

LIMITS = {"evaluate": 15.0, "report": 60.0}
"""Seconds that the parts of `large` may take."""


def metrics(options: argparse.Namespace) -> None:
    """5000 images, 80 classes, 100 detections an image, by both evaluators."""
    truth, found = synthetic(options.images, 80, 100)
    seconds, results = {}, {}
    for engine in ("hotcoco", "pycocotools"):
        start = time.perf_counter()
        results[engine] = coco.evaluate(truth, found, engine=engine).metrics
        seconds[engine] = time.perf_counter() - start
    difference = max(abs(value - results["pycocotools"][name]) for name, value in results["hotcoco"].items())
    figures = {f"{engine}_s": value for engine, value in seconds.items()} | {"largest_difference": difference}
    report("evaluation-metrics", seconds["pycocotools"] / seconds["hotcoco"], figures, options)


def large(options: argparse.Namespace) -> None:
    """Time and peak memory on a split of Open Images' size; the ratio is that to the limits."""
    figures = {}
    for kind in LIMITS:
        command = [sys.executable, "-m", "benchmarks.large_split", kind]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, value in json.loads(answer).items():
            figures[f"{kind}_{name}"] = value
    ratio = min(limit / figures[f"{kind}_seconds"] for kind, limit in LIMITS.items())
    report("evaluation-large", ratio, figures, options)


def inference(options: argparse.Namespace) -> None:
    """Images a second from shards to scored detections."""
    with tempfile.TemporaryDirectory() as root:
        changes = {"loader.image_size": options.size, "model.background_class": True}
        config = recipes.load("coco_r50", changes)
        raw = download(f"sample:images={options.samples},size={options.size},seed=1", root, config.data)
        dataset = ShardDataset(shard(raw, root, config.data)["uri"], "train")
        classes = len(dataset.categories)
        stock = stock_model(classes + 1, options.size, torch.device("cpu")).eval()
        detector = build(config.model, classes).eval()
        detector.load_state_dict(stock.state_dict())
        detector = detector.to(memory_format=torch.channels_last)
        threads = options.threads
        candidates = {
            "reference_1_thread": lambda: reference(stock, dataset, 1),
            "reference": lambda: reference(stock, dataset, threads),
            "ours": lambda: ours(detector, dataset, config, threads),
        }
        found: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(options.rounds):
            for name, candidate in candidates.items():
                start = time.perf_counter()
                candidate()
                found[name].append(len(dataset) / (time.perf_counter() - start))
    rates = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    figures: dict[str, Any] = {f"{name}_images_per_second": rate for name, rate in rates.items()}
    figures["ratio_at_equal_threads"] = rates["ours"] / rates["reference"]
    report("evaluation-inference", rates["ours"] / rates["reference_1_thread"], figures, options)


@torch.inference_mode()
def reference(model: Any, dataset: ShardDataset, threads: int) -> None:
    """Score as torchvision's references/detection does: one image at a time."""
    torch.set_num_threads(threads)
    truth = dataset.annotations()
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = truth
        known.createIndex()
        scorer = COCOeval(known, iouType="bbox")
        for index in range(len(dataset)):
            data, record = dataset.read(index)
            image = pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB")).float() / 255
            (output,) = model([image])
            boxes, scores, labels = (output[name] for name in ("boxes", "scores", "labels"))
            boxes[:, 2:] -= boxes[:, :2]
            rows = zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)
            results = [
                {"image_id": record["image_id"], "category_id": label - 1, "bbox": box, "score": score}
                for box, score, label in rows
            ]
            scorer.cocoDt = known.loadRes(results) if results else COCO()
            scorer.params.imgIds = [record["image_id"]]
            scorer.evaluate()


def ours(detector: Any, dataset: ShardDataset, config: Config, threads: int) -> None:
    """Score as `evaluate` does, with the same annotations read."""
    torch.set_num_threads(threads)
    found = predict_split(detector, dataset, config, SINGLE)
    coco.evaluate(Truth.from_coco(dataset.annotations()), found)


PARTS = {"metrics": metrics, "large": large, "inference": inference}


def main() -> None:
    """Measure one part, or all."""
    options = arguments(__doc__, part="all", images=5000, samples=48, size=320)
    for name, part in PARTS.items():
        if options.part in ("all", name):
            part(options)


if __name__ == "__main__":
    main()
