"""Small data sets on disk for the tests of this folder."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_store import hurried, proxy
from openimages_mirror import mirror
from PIL import Image

from kubedet import cli

__all__ = ["hurried", "mirror", "proxy"]


def jpeg(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 5, width // 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(buffer, "JPEG")
    return buffer.getvalue()


def coco_form(names: list[str], boxes_each: int = 2) -> dict[str, Any]:
    """Images of 40x30 with boxes of categories 3 and 17 in turn."""
    return {
        "images": [
            {"id": 100 + index, "file_name": name, "width": 40, "height": 30}
            for index, name in enumerate(names)
        ],
        "annotations": [
            {
                "id": index * boxes_each + number,
                "image_id": 100 + index,
                "category_id": (3, 17)[number % 2],
                "bbox": [1 + number, 2, 10, 8],
                "area": 80,
                "iscrowd": 0,
                "segmentation": [[1, 2, 3, 4, 5, 6]],
            }
            for index in range(len(names))
            for number in range(boxes_each)
        ],
        "categories": [{"id": 3, "name": "cat"}, {"id": 17, "name": "dog"}],
    }


@pytest.fixture
def make_coco(tmp_path: Path) -> Callable[..., Path]:
    """Write annotations/instances_<split>.json and <split>/<name>; return the folder."""

    def make(folder: str = "coco", **splits: list[str]) -> Path:
        root = tmp_path / folder
        (root / "annotations").mkdir(parents=True)
        for split, names in splits.items():
            form = json.dumps(coco_form(names))
            (root / "annotations" / f"instances_{split}.json").write_text(form)
            for index, name in enumerate(names):
                path = root / split / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg(seed=index))
        return root

    return make


@pytest.fixture
def fifteen_images(make_coco: Callable[..., Path]) -> Path:
    """Folder of a COCO set of twelve training images and three for validation."""
    return make_coco(
        train=[f"{number}.jpg" for number in range(12)], val=[f"v{number}.jpg" for number in range(3)]
    )


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """Change a JSON file in place."""

    def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        form = json.loads(path.read_text())
        change(form)
        path.write_text(json.dumps(form))

    return edit


@pytest.fixture
def make_jpeg() -> Callable[..., bytes]:
    """Encode a small picture."""
    return jpeg


@pytest.fixture
def make_yolo(tmp_path: Path) -> Callable[..., Path]:
    """Write images/<split>/<stem>.jpg, labels/<split>/<stem>.txt and data.yaml; return the folder."""

    def make(yaml: str = "", root: str = "yolo", **splits: dict[str, str | None]) -> Path:
        folder = tmp_path / root
        for split, labels in splits.items():
            for number, (stem, text) in enumerate(labels.items()):
                image = folder / "images" / split / f"{stem}.jpg"
                image.parent.mkdir(parents=True, exist_ok=True)
                image.write_bytes(jpeg(seed=number))
                label = folder / "labels" / split / f"{stem}.txt"
                label.parent.mkdir(parents=True, exist_ok=True)
                if text is not None:
                    label.write_text(text)
        data_yaml = yaml or "".join(f"{split}: images/{split}\n" for split in splits) + "names: [cat, dog]\n"
        (folder / "data.yaml").write_text(data_yaml)
        return folder

    return make


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `kubedet data inspect`; return the exit code and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        return cli.main(["data", "inspect", *map(str, words)]), *capsys.readouterr()

    return run
