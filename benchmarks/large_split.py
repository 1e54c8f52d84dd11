"""Measure time and memory of scoring a split of Open Images' size, in a separate process.

    python -m benchmarks.large_split evaluate|report

Prints one line of JSON: seconds, peak_gb (peak memory of the process) and data_gb (the same before scoring).
PyTorch is not loaded, because scoring does not need it.
"""

import io
import json
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from trainer.evaluation import coco, scoring
from trainer.evaluation.gate import Evidence, decide
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.report import evaluation_page, gallery
from trainer.report.evaluation_page import ReportData

IMAGES, CLASSES, DETECTIONS_PER_IMAGE = 41_620, 601, 100
SIDE = 1000


def synthetic(images: int, classes: int, per_image: int, *, seed: int = 0) -> tuple[Truth, Predictions]:
    """Return random truth and predictions: `per_image` detections, a third of them near a box.

    There are about seven boxes per image, 1.2 % of them crowds, and frequent and rare classes.
    """
    random = np.random.default_rng(seed)
    count = 7 * images
    image_ids = np.sort(random.integers(0, images, count))
    labels = (classes * random.random(count) ** 2).astype(int)
    boxes = _boxes(random, count)
    truth = Truth(
        [{"id": i, "file_name": f"{i}.jpg", "width": SIDE, "height": SIDE} for i in range(images)],
        [{"id": i, "name": f"class {i}"} for i in range(classes)],
        image_ids,
        labels,
        boxes,
        boxes[:, 2] * boxes[:, 3],
        random.random(count) < 0.012,
    )
    near = random.integers(0, count, images * per_image // 3)
    other = images * per_image - len(near)
    moved = np.clip(boxes[near] * (1 + 0.1 * random.normal(size=(len(near), 4))), 0, SIDE - 1)
    moved[:, 2:] = np.clip(moved[:, 2:], 1, SIDE - moved[:, :2])
    return truth, Predictions(
        np.r_[image_ids[near], random.integers(0, images, other)],
        np.r_[labels[near], (classes * random.random(other) ** 2).astype(int)],
        np.r_[moved, _boxes(random, other)],
        np.r_[0.3 + 0.7 * random.random(len(near)), random.random(other) ** 3],
    )


def _boxes(random: np.random.Generator, count: int) -> np.ndarray:
    return np.concatenate([random.random((count, 2)) * 500, 10 + random.random((count, 2)) * 300], axis=1)


def evaluate() -> Callable[[], object]:
    """Return a function that computes the COCO metrics, with all checks."""
    truth, detections = synthetic(IMAGES, CLASSES, DETECTIONS_PER_IMAGE)
    return lambda: coco.evaluate(truth, detections)


def whole_report() -> Callable[[], object]:
    """Return a function that computes all scores, compares with a baseline and writes both reports."""
    truth, detections = synthetic(IMAGES, CLASSES, DETECTIONS_PER_IMAGE)
    _, base = synthetic(IMAGES, CLASSES, DETECTIONS_PER_IMAGE, seed=1)

    def run() -> int:
        scores = scoring.score({"images": truth.images}, truth, detections, "hotcoco")
        compared = scoring.compare("baseline", "", base, truth, scores, samples=200)
        evidence = Evidence(scores.metrics, scores.coco.per_class, compared.changes)
        data = ReportData(
            "large",
            "test",
            IMAGES,
            scores,
            verdict=decide(evidence, ["coco/AP >= baseline - 0.01", "AP[*] >= 0.01"]),
            comparison=compared,
            gallery=gallery.worst_images(truth, detections, scores.matches, _picture),
        )
        return len(evaluation_page.render_html(data)) + len(evaluation_page.render_markdown(data))

    return run


def _picture(image_id: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (image_id % 256, 90, 90)).save(buffer, "JPEG")
    return buffer.getvalue()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Measure the task that the first argument names."""
    run = {"evaluate": evaluate, "report": whole_report}[sys.argv[1]]()
    before = _peak()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    print(
        json.dumps({"seconds": round(seconds, 2), "peak_gb": round(_peak(), 2), "data_gb": round(before, 2)})
    )


if __name__ == "__main__":
    main()
