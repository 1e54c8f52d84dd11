"""Measure evaluation: COCO metrics against pycocotools, a split of Open Images' size, and inference.

    python -m benchmarks.evaluation                        # all parts; about ten minutes on two cores
    python -m benchmarks.evaluation --part metrics         # 5000 images x 80 classes x 100 detections
    python -m benchmarks.evaluation --part large           # 41,620 x 601, 4.16 million detections
    python -m benchmarks.evaluation --part inference       # 48 images of 320 px, all cores

`large` measures seconds and peak memory in separate processes: `evaluate` is the COCO metrics with all
checks, `report` everything after inference, with a baseline. `inference` compares with torchvision's
reference loop (image by image, PIL, pycocotools) with one thread, as its script sets it, and with all cores,
on square images and the same weights.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.transforms.functional import pil_to_tensor

from benchmarks.common import CLOCKS, arguments, report, stock_model
from benchmarks.large_split import synthetic
from trainer.config.schema import Config
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.evaluation import coco
from trainer.evaluation.inference import predict_split
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.launching.distributed import SINGLE
from trainer.model import recipes
from trainer.model.architecture import build

CLASSES = 80
LIMITS = {"evaluate": 15.0, "report": 60.0}  # Seconds for the parts of `large`.


def metrics(options: argparse.Namespace) -> None:
    """Compare the speed and the metrics of both evaluators."""
    truth, detections = synthetic(options.images, 80, 100)
    seconds, results = {}, {}
    for engine in ("hotcoco", "pycocotools"):
        start = time.perf_counter()
        results[engine] = coco.evaluate(truth, detections, engine=engine).metrics
        seconds[engine] = time.perf_counter() - start
    difference = max(abs(value - results["pycocotools"][name]) for name, value in results["hotcoco"].items())
    ratio = seconds["pycocotools"] / seconds["hotcoco"]
    figures = {f"{engine}_s": value for engine, value in seconds.items()}
    figures |= {"ratio": ratio, "largest_difference": difference}
    report(
        "evaluation-metrics",
        ratio,
        figures,
        options,
        at_least={"ratio": 50},
        at_most={"largest_difference": 1e-12},
    )


def large(options: argparse.Namespace) -> None:
    """Measure time and peak memory; the ratio is limit to time."""
    figures = {}
    for kind in LIMITS:
        command = [sys.executable, "-m", "benchmarks.large_split", kind]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, value in json.loads(printed).items():
            figures[f"{kind}_{name}"] = value
    ratio = min(limit / figures[f"{kind}_seconds"] for kind, limit in LIMITS.items())
    limits = {f"{kind}_seconds": limit for kind, limit in LIMITS.items()}
    report("evaluation-large", ratio, figures, options, at_most=limits)


def inference(options: argparse.Namespace) -> None:
    """Measure images per second from shards to scored detections."""
    options.threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as root:
        # The value of torchvision's model.
        changes = {"model.detections_per_image": 300}
        config = recipes.load("coco_r50", {"loader.image_size": options.size, **changes})
        source = _squares(Path(root) / "squares", options.samples, options.size)
        raw = download(f"coco:{source}", root, config.data)
        dataset = ShardDataset(shard(raw, root, config.data).uri, "train")
        stock = _raise_scores(stock_model(CLASSES + 1, options.size, torch.device("cpu")).eval())
        detector = build(config.model, CLASSES).eval()
        detector.load_state_dict(stock.state_dict())
        detector = detector.fold_batchnorm().to(memory_format=torch.channels_last)
        candidates = {
            "reference_1_thread": lambda: reference(stock, dataset, 1),
            "reference": lambda: reference(stock, dataset, options.threads),
            "ours": lambda: ours(detector, dataset, config, options.threads),
        }
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for number in range(options.rounds + 1):
            for name, candidate in candidates.items():
                start = CLOCKS[options.clock]()
                candidate()
                seconds[name] += [CLOCKS[options.clock]() - start] * bool(number)  # Skips the warm-up.
    rates = {name: len(dataset) / statistics.median(values) for name, values in seconds.items()}
    figures: dict[str, Any] = {f"{name}_images_per_second": rate for name, rate in rates.items()}
    figures["ratio"] = rates["ours"] / rates["reference_1_thread"]
    figures["ratio_at_equal_threads"] = rates["ours"] / rates["reference"]
    report("evaluation-inference", figures["ratio"], figures, options, at_least={"ratio": 1.5})


def _squares(folder: Path, count: int, size: int) -> Path:
    """Write a COCO dataset of colored squares; return its JSON file."""
    random = np.random.default_rng(0)
    folder.mkdir()
    images, annotations = [], []
    for number in range(1, count + 1):
        picture = Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8)).resize((size, size))
        picture.save(folder / f"{number}.jpg", quality=92)
        images.append({"id": number, "file_name": f"{number}.jpg", "width": size, "height": size})
        for x, y, width, height in (size * random.uniform(0.1, 0.4, (5, 4))).tolist():
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "bbox": [x, y, width, height],
                    "category_id": int(random.integers(1, CLASSES + 1)),
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": f"class {number}"} for number in range(1, CLASSES + 1)]
    whole = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances_train.json").write_text(json.dumps(whole))
    return folder / "instances_train.json"


def _raise_scores(model: Any) -> Any:
    """Raise the scores of a model with random weights, so that it finds hundreds of objects."""
    last = model.head.classification_head.cls_logits
    with torch.no_grad():
        last.weight.mul_(3)
        last.bias.view(-1, CLASSES + 1)[:, 0] = -20
    return model


@torch.inference_mode()
def reference(model: Any, dataset: ShardDataset, threads: int) -> Predictions:
    """Score images one at a time, like torchvision's references/detection."""
    torch.set_num_threads(threads)
    truth, everything = dataset.annotations(), []
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
            everything += results
            scorer.cocoDt = known.loadRes(results) if results else COCO()
            scorer.params.imgIds = [record["image_id"]]
            scorer.evaluate()
    return Predictions.from_coco(everything)


def ours(detector: Any, dataset: ShardDataset, config: Config, threads: int) -> Predictions:
    """Score like `evaluate`, including reading the annotations."""
    torch.set_num_threads(threads)
    detections = predict_split(detector.predict, dataset, config, SINGLE)
    coco.evaluate(Truth.from_coco(dataset.annotations()), detections)
    return detections


PARTS = {"metrics": metrics, "large": large, "inference": inference}


def main() -> None:
    """Measure one part or all parts."""
    options = arguments(__doc__, part="all", images=5000, samples=48, size=320)
    for name, part in PARTS.items():
        if options.part in ("all", name):
            part(options)


if __name__ == "__main__":
    main()
