"""Generated images as large as photographs, and shards of them, for benchmarks."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shard_folder import SAMPLE, VERSION
from trainer.data.shards import shard


def picture(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG with about as many bytes as a photograph of that size (0.45 per pixel)."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = generator.normal(0, 11, (height, width, 1))
    buffer = io.BytesIO()
    Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_shards(folder: Path, images: int, width: int, height: int, target: str = "") -> str:
    """Write shards of `images` images with eight boxes each; return their URI."""
    (folder / "train").mkdir(parents=True)
    pictures = [picture(width, height, number) for number in range(min(images, 100))]
    for number in range(images):
        (folder / "train" / f"{number:06}.jpg").write_bytes(pictures[number % len(pictures)])
    low, high = np.array([[0, 0, 0.03, 0.04], [0.47, 0.42, 0.47, 0.52]]) * [width, height, width, height]
    boxes = np.random.default_rng(0).uniform(low, high, (images, 8, 4)).round(1)
    annotations = [
        {
            "id": 8 * image + place + 1,
            "image_id": image + 1,
            "category_id": 1,
            "bbox": box.tolist(),
            "area": float(box[2] * box[3]),
            "iscrowd": 0,
        }
        for image, boxes_of_image in enumerate(boxes)
        for place, box in enumerate(boxes_of_image)
    ]
    listed = [
        {"id": number + 1, "file_name": f"{number:06}.jpg", "width": width, "height": height}
        for number in range(images)
    ]
    form = {"images": listed, "annotations": annotations, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(form))
    config = DataConfig(val_fraction=0.0, processes=1)
    target = target or str(folder / "data")
    return shard(download(f"coco:{folder}", target, config), target, config).uri


def write_large_index(folder: Path, samples: int = 1_743_042, shard_size: int = 220) -> None:
    """Write the index and the sample table of a large split, without the shards."""
    table = np.zeros(samples, SAMPLE)
    table["shard"], table["image_id"] = np.arange(samples) // shard_size, np.arange(samples)
    folder.mkdir()
    rows = folder / "train.samples.npy"
    np.save(rows, table)
    files = {
        rows.name: {"bytes": rows.stat().st_size, "sha256": hashlib.sha256(rows.read_bytes()).hexdigest()}
    }
    shards = [
        {
            "name": f"train-{number:05}.tar",
            "samples": count,
            "boxes": 8 * count,
            "bytes": 2**26,
            "sha256": "0" * 64,
        }
        for number, count in enumerate(np.bincount(table["shard"]).tolist())
    ]
    split = {"samples": samples, "boxes": 8 * samples, "shards": shards}
    index = {
        "kind": "shards", "version": VERSION, "fingerprint": "", "source": "", "raw_fingerprint": "",
        "categories": [], "problems": {}, "class_counts": {}, "settings": {}, "splits": {"train": split},
        "files": files,
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index))
