"""Adds to a bundle what builds and checks a TensorRT engine: build_engine.py and check.zip.

check.zip has the squares of validation images as JPEGs, truth.json (their ground truth in COCO's form, in
pixels of the square), and reference.json, the COCO AP of model.raw.onnx on these JPEGs in onnxruntime.
"""

import io
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.config.types import InputSquare
from trainer.data.decoding import read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import fit
from trainer.export import build_engine
from trainer.export.formats import OnnxRuntime
from trainer.export.quantize import evenly_spread

_MAX_IMAGES, _BATCH = 100, 8
_JPEG_QUALITY = 95  # of the JPEGs: 100 images of 640 pixels are about 15 MB, in a lossless form 50


def add_engine_check(
    folder: Path, dataset: ShardDataset, square: InputSquare, thresholds: Mapping[str, float], limit: int
) -> None:
    """Write both files next to model.raw.onnx, with at most `limit` images and never more than 100."""
    shutil.copyfile(build_engine.__file__, folder / Path(build_engine.__file__).name)
    path = folder / build_engine.CHECK
    with zipfile.ZipFile(path, "w") as file:
        scales = {}
        for index in evenly_spread(len(dataset), min(limit, _MAX_IMAGES)):
            image, record = read_sample(dataset, int(index))
            fitted, scales[record["image_id"]] = fit(image, square)
            jpeg = io.BytesIO()
            pixels = Image.fromarray(fitted.permute(1, 2, 0).contiguous().numpy())
            pixels.save(jpeg, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
            file.writestr(zipfile.ZipInfo(f"{record['image_id']}.jpg"), jpeg.getvalue())
        truth = dataset.annotations()
        truth["images"] = [
            {"id": image_id, "file_name": f"{image_id}.jpg", "width": square.size, "height": square.size}
            for image_id in scales
        ]
        truth["annotations"] = [
            {
                **item,
                "bbox": (np.array(item["bbox"]) * scales[item["image_id"]]).tolist(),
                "area": item["area"] * np.prod(scales[item["image_id"]][:2]),
            }
            for item in truth["annotations"]
            if item["image_id"] in scales
        ]
        file.writestr(zipfile.ZipInfo("truth.json"), json.dumps(truth))
    runtime = OnnxRuntime(folder / build_engine.GRAPH)
    ap = build_engine.score(path, runtime.run, thresholds, _BATCH)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(zipfile.ZipInfo(build_engine.REFERENCE), json.dumps({"coco/AP": ap}))
