"""Checks that exported files give the results of the trained model, in the runtimes that serve them.

Compares COCO AP and single detections, then batches, an image without objects and inputs of a wrong shape.
"""

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchvision.ops import batched_nms

from trainer.base import log
from trainer.base.errors import ExportError, translated
from trainer.config.schema import Config
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL, letterbox
from trainer.evaluation import coco_metrics
from trainer.evaluation.inference import in_images
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.export.detection_pairing import EXACT, Comparison, Matches
from trainer.export.formats import FORMATS, Format, Runtime
from trainer.export.quantize import evenly_spread
from trainer.model.architecture import Architecture
from trainer.model.postprocess import Detections

_BATCH = 8
_LATENCY_RUNS = 50
_LATENCY_SECONDS = 5.0
_OTHER_VERSIONS = "use the versions of torch, onnx and onnxruntime in constraints.txt; nothing was published"


@dataclass(frozen=True)
class Latency:
    """Times of requests of one image."""

    p50_ms: float
    p95_ms: float
    runs: int
    threads: int
    cpu: str


@dataclass(frozen=True)
class Check:
    """Result of the check of one exported file."""

    runtime: str
    images: int
    ap: float
    """COCO AP of the file; -1 if the images have no boxes."""
    ap_change: float
    """The difference to the AP of the trained model."""
    matches: Matches
    latency: Latency


class Served:
    """An exported file in its runtime, giving detections."""

    def __init__(self, kind: Format, path: Path, thresholds: Mapping[str, float]) -> None:
        self.kind, self.runtime, self._thresholds = kind, kind.open(path), thresholds

    def predict(self, images: np.ndarray) -> Detections:
        """Detect objects in uint8 images [B, 3, S, S]."""
        outputs = [torch.from_numpy(part) for part in self.runtime.run(images)]
        return suppress(outputs[0], outputs[1], self._thresholds) if self.kind.raw else Detections(*outputs)


def verify(
    folder: Path,
    names: Sequence[str],
    detector: Architecture,
    dataset: ShardDataset,
    config: Config,
    image_size: int,
) -> dict[str, Check]:
    """Compare written files with the trained model on images of a split."""
    served = {}
    for name in names:
        with _running(name, "cannot be opened by the runtime that serves it"):
            served[name] = Served(FORMATS[name], folder / FORMATS[name].files[0], detector.thresholds)
    indices = evenly_spread(len(dataset), config.export.check_images)
    comparisons = {name: Comparison(FORMATS[name].tolerance) for name in names}
    predictions: dict[str, list[Predictions]] = {name: [Predictions.from_coco([])] for name in ["", *names]}
    sizes = dict(zip(dataset.image_ids.tolist(), dataset.sizes, strict=True))
    squares = torch.empty(0)
    with log.progress("check", len(indices), "images") as bar:
        for images, image_ids, scales in _batches(dataset, indices, image_size):
            squares = images if not len(squares) else squares
            trained = detector.predict(images)
            predictions[""].append(in_images(trained, image_ids, scales, sizes))
            for name, one in served.items():
                with _running(name, "fails on validation images"):
                    detections = one.predict(images.numpy())
                comparisons[name].add(trained, detections)
                predictions[name].append(in_images(detections, image_ids, scales, sizes))
            bar.update(len(images))
    ap = _average_precision(dataset, indices, predictions)
    checks = {}
    for name, one in served.items():
        matches = comparisons[name].result()
        _judge(name, ap[name] - ap[""], matches, len(indices), config)
        _check_edges(name, one, squares, image_size)
        checks[name] = Check(
            one.runtime.name, len(indices), ap[name], ap[name] - ap[""], matches,
            latency(one.runtime, squares[:1].numpy()),
        )  # fmt: skip
    return checks


def _running(name: str, failing: str) -> AbstractContextManager[None]:
    return translated(ExportError, f"the exported model ({name}) {failing}", fix=_OTHER_VERSIONS)


def suppress(boxes: torch.Tensor, scores: torch.Tensor, thresholds: Mapping[str, float]) -> Detections:
    """Select detections from the raw graph's outputs, by the rules of TensorRT's EfficientNMS.

    Boxes are [B, N, 4], scores [B, N, C]; thresholds are `score`, `nms` and `detections_per_image`.
    """
    limit = int(thresholds["detections_per_image"])
    padded = Detections(
        torch.zeros(len(boxes), limit, 4), torch.zeros(len(boxes), limit),
        torch.full((len(boxes), limit), -1), torch.zeros(len(boxes), dtype=torch.int64),
    )  # fmt: skip
    for row in range(len(boxes)):
        anchor, label = torch.nonzero(scores[row] > thresholds["score"], as_tuple=True)
        score = scores[row, anchor, label]
        # In fp64: batched_nms adds an offset for each class, which fp32 would round.
        kept = batched_nms(boxes[row, anchor].double(), score.double(), label, thresholds["nms"])[:limit]
        count = len(kept)
        padded.boxes[row, :count] = boxes[row, anchor[kept]]
        padded.scores[row, :count], padded.labels[row, :count] = score[kept], label[kept]
        padded.num[row] = count
    return padded


def latency(runtime: Runtime, image: np.ndarray) -> Latency:
    """Time requests of one image uint8 [1, 3, S, S], after three for warming up."""
    times: list[float] = []
    end = time.perf_counter() + _LATENCY_SECONDS
    for number in range(_LATENCY_RUNS + 3):
        start = time.perf_counter()
        runtime.run(image)
        if number >= 3:
            times.append(time.perf_counter() - start)
        if len(times) >= 10 and time.perf_counter() > end:
            break
    p50, p95 = np.percentile(times, [50, 95]) * 1000
    return Latency(round(float(p50), 3), round(float(p95), 3), len(times), runtime.threads, _cpu_name())


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _batches(
    dataset: ShardDataset, indices: np.ndarray, image_size: int
) -> Iterator[tuple[torch.Tensor, list[int], list[float]]]:
    for start in range(0, len(indices), _BATCH):
        squares, image_ids, scales = [], [], []
        for index in indices[start : start + _BATCH]:
            image, record = read_sample(dataset, int(index))
            square, scale = letterbox(image, image_size)
            squares.append(square)
            image_ids.append(record["image_id"])
            scales.append(scale)
        yield torch.stack(squares), image_ids, scales


def _average_precision(
    dataset: ShardDataset, indices: np.ndarray, predictions: dict[str, list[Predictions]]
) -> dict[str, float]:
    chosen = set(dataset.image_ids[indices].tolist())
    truth = dataset.annotations()
    truth["images"] = [image for image in truth["images"] if image["id"] in chosen]
    truth["annotations"] = [item for item in truth["annotations"] if item["image_id"] in chosen]
    if not truth["annotations"]:
        return dict.fromkeys(predictions, -1.0)
    return {
        name: coco_metrics.evaluate(truth, Predictions.join(parts)).metrics["coco/AP"]
        for name, parts in predictions.items()
    }


def _judge(name: str, change: float, matches: Matches, images: int, config: Config) -> None:
    int8 = name == "onnx-int8"
    key = "max_ap_change_int8" if int8 else "max_ap_change"
    limit = getattr(config.export, key)
    problems = []
    if abs(change) > limit:
        problems.append(f"COCO AP changes by {change:+.4f}, at most {limit:g} is allowed (export.{key})")
    least = config.export.min_match
    if FORMATS[name].tolerance.binding and matches.matched < least:
        problems.append(f"{matches.matched:.1%} of the detections match, {least:.1%} must (export.min_match)")
    if problems:
        raise ExportError(
            f"the exported model ({name}) differs from the trained one on {images} images: "
            + "; ".join(problems),
            fix="leave onnx-int8 out of export.formats, or calibrate on more images "
            "(export.calibration_images); nothing was published" if int8 else _OTHER_VERSIONS,
        )  # fmt: skip


def _check_edges(name: str, served: Served, squares: torch.Tensor, image_size: int) -> None:
    empty = torch.full((3, image_size, image_size), FILL, dtype=torch.uint8)
    batch = torch.stack([*squares[:3], empty]).numpy()
    with _running(name, "fails on an image without objects"):
        served.predict(batch[-1:])
    with _running(name, "fails on a batch"):
        together = served.predict(batch)
    alone = [served.predict(batch[row : row + 1]) for row in range(len(batch))]
    # Rounding does not depend on the batch: int8 must be exact here too.
    comparison = Comparison(EXACT)
    comparison.add(together, Detections(*map(torch.cat, zip(*alone, strict=True))))
    matched = comparison.result().matched
    if matched < 0.99:
        raise ExportError(
            f"the exported model ({name}) detects other objects in a batch than in single images "
            f"({matched:.1%} match)",
            fix=_OTHER_VERSIONS,
        )
    for shape in ((1, 3, image_size + 32, image_size), (1, 1, image_size, image_size), (3, image_size)):
        try:
            served.runtime.run(np.zeros(shape, np.uint8))
        except Exception:  # the runtimes have no common error  # noqa: S112
            continue
        raise ExportError(
            f"the exported model ({name}) accepts an input of the wrong shape {list(shape)}",
            fix=_OTHER_VERSIONS,
        )
