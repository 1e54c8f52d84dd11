"""Builds a TensorRT engine from model.raw.onnx, and keeps it only if it finds what the model finds.

    pip install tensorrt polygraphy pycocotools pillow    # --fp16 also needs 'nvidia-modelopt[onnx]'
    python build_engine.py --fp16

Part of a bundle of kubedet, which it does not need. TensorRT can build an engine that gives wrong boxes,
without an error. So the engine is scored on the images in check.zip, and refused if its COCO AP is lower than
that of model.raw.onnx in onnxruntime by more than --max-loss.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GRAPH, METADATA = "model.raw.onnx", "model_metadata.json"
CHECK, REFERENCE = "check.zip", "reference.json"
INSTALL = "pip install tensorrt polygraphy pycocotools pillow; for --fp16 also 'nvidia-modelopt[onnx]'"
_CANDIDATES = 10_000  # Best pairs of box and class of an image that are suppressed.

Run = Callable[[np.ndarray], Sequence[np.ndarray]]
"""Boxes [B, N, 4] or [B, N, C, 4] and scores [B, N, C] of uint8 images [B, 3, S, S]."""


def select(
    boxes: np.ndarray, scores: np.ndarray, thresholds: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the detections of one image: boxes [K, 4], scores [K] and labels [K], best first.

    `boxes` are [N, 4], or [N, C, 4] if each class has its own; `scores` are [N, C]. `thresholds` are
    `score`, `detections_per_image` and, for a detector with suppression, `nms`: the largest overlap (IoU)
    of two detections of a class.
    """
    limit, flat = int(thresholds["detections_per_image"]), scores.ravel()
    pairs = np.flatnonzero(flat > thresholds["score"])
    most = _CANDIDATES if "nms" in thresholds else limit
    pairs = pairs[np.argsort(-flat[pairs], kind="stable")[:most]]
    rows, labels = np.divmod(pairs, scores.shape[1])
    corners = (boxes[rows, labels] if boxes.ndim == 3 else boxes[rows]).astype(np.float64)
    if "nms" in thresholds:
        areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
        left, kept = np.arange(len(pairs)), list[int]()
        while len(left) and len(kept) < limit:
            best, left = left[0], left[1:]
            kept.append(int(best))
            low = np.maximum(corners[left, :2], corners[best, :2])
            high = np.minimum(corners[left, 2:], corners[best, 2:])
            shared = np.maximum(high - low, 0).prod(axis=1)
            joined = areas[left] + areas[best] - shared
            left = left[(labels[left] != labels[best]) | ~(shared > thresholds["nms"] * joined)]
        pairs, labels, corners = pairs[kept], labels[kept], corners[kept]
    return corners.astype(np.float32), flat[pairs], labels


def score(check: Path, run: Run, thresholds: Mapping[str, float], batch: int) -> float:
    """Return the COCO AP of a graph on the images of check.zip."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found: list[dict[str, Any]] = []
    with zipfile.ZipFile(check) as file:
        truth = json.loads(file.read("truth.json"))
        for ids, images in _batches(file, truth["images"], batch):
            for image_id, boxes, scores in zip(ids, *run(images), strict=True):
                for box, value, label in zip(*select(boxes, scores, thresholds), strict=True):
                    x1, y1, x2, y2 = box.tolist()
                    found.append(
                        {
                            "id": len(found) + 1, "image_id": image_id, "category_id": int(label),
                            "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1),
                            "iscrowd": 0, "score": float(value),
                        }
                    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        pair = COCO(), COCO()
        for coco, items in zip(pair, (truth["annotations"], found), strict=True):
            coco.dataset = {**truth, "annotations": items}
            coco.createIndex()
        scored = COCOeval(*pair, "bbox")
        for step in (scored.evaluate, scored.accumulate, scored.summarize):
            step()
    return float(scored.stats[0])


def _batches(
    file: zipfile.ZipFile, images: list[dict[str, Any]], batch: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    from PIL import Image

    for start in range(0, len(images), batch):
        some = images[start : start + batch]
        pixels = [np.asarray(Image.open(io.BytesIO(file.read(image["file_name"])))) for image in some]
        yield [image["id"] for image in some], np.stack(pixels).transpose(0, 3, 1, 2).copy()


def build(graph: Path, fp16: bool, batch: int, size: int) -> tuple[bytes, Run]:
    """Build an engine for 1 to `batch` images of `size` pixels; returns its bytes, and what runs it.

    The network is strongly typed, the only kind that TensorRT 11 has: ModelOpt chooses the operators in 16
    bits. Sources: NVIDIA's migration guide from TensorRT 10 to 11, and polygraphy 0.53.6.
    """
    import tensorrt  # noqa: F401  (polygraphy's own error does not say how to install it)
    from polygraphy.backend import trt

    model = graph.read_bytes()
    if fp16:
        from modelopt.onnx.autocast import convert_to_mixed_precision

        mixed = convert_to_mixed_precision(
            onnx_path=str(graph), low_precision_type="fp16", keep_io_types=True
        )
        model = mixed.SerializeToString()
    shapes = [(count, 3, size, size) for count in (1, batch, batch)]
    config = trt.CreateConfig(profiles=[trt.Profile().add("images", *shapes)])
    engine = bytes(
        trt.engine_bytes_from_network(trt.network_from_onnx_bytes(model, strongly_typed=True), config)
    )
    runner = trt.TrtRunner(trt.engine_from_bytes(engine))
    runner.activate()

    def run(images: np.ndarray) -> Sequence[np.ndarray]:
        outputs = runner.infer({"images": images})
        return outputs["boxes"], outputs["scores"]

    return engine, run


def main(arguments: list[str] | None = None) -> int:
    """Build, score, and write or refuse an engine; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", default="model.engine", help="path of the engine file")
    parser.add_argument(
        "--fp16", action="store_true", help="compute in 16 bits if ModelOpt considers it safe"
    )
    parser.add_argument("--batch", type=int, default=8, help="maximum number of images per request")
    parser.add_argument("--max-loss", type=float, default=0.005, help="maximum loss of COCO AP (0 to 1)")
    parser.add_argument("--bundle", type=Path, default=Path(__file__).parent, help="folder of the bundle")
    options = parser.parse_args(arguments)
    if options.batch < 1:
        parser.error("--batch must be 1 or more")
    metadata = json.loads((options.bundle / METADATA).read_text())
    thresholds, size = metadata["thresholds"], metadata["input"]["input_size"]
    check = options.bundle / CHECK
    with zipfile.ZipFile(check) as file:
        expected = json.loads(file.read(REFERENCE))["coco/AP"]
    if expected <= options.max_loss:
        print(f"no engine can be judged: the model's AP on check.zip is {expected:.4f}", file=sys.stderr)
        return 1
    try:
        engine, run = build(options.bundle / GRAPH, options.fp16, options.batch, size)
        ap = score(check, run, thresholds, options.batch)
    except ImportError as error:
        print(f"{error}\n{INSTALL}", file=sys.stderr)
        return 1
    figures = f"COCO AP {ap:.4f}, model.raw.onnx in onnxruntime {expected:.4f}"
    if not expected - ap <= options.max_loss:
        print(f"refused: {figures}; at most {options.max_loss:g} may be lost (--max-loss)", file=sys.stderr)
        return 1
    partial = Path(f"{options.output}.partial")
    partial.write_bytes(engine)
    os.replace(partial, options.output)
    print(f"{options.output}: {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
