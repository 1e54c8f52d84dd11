"""One maker of small data sets for all reports."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from source_rows import shards_of

from trainer.config.schema import DataConfig
from trainer.data.shard_index import ShardDataset

SIZE = (40, 30)


class Sets:
    """Small data sets of a public form in a folder, and what a training or an evaluation reads of them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def picture(self, name: str, size: tuple[int, int] = SIZE, orientation: int = 1, seed: int = 0) -> Path:
        """Write an image of stored width and height; `orientation` is that of its Exif block."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(path, exif=exif)
        return path

    def text(self, name: str, text: str) -> Path:
        """Write a text file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def coco(
        self,
        boxes: Sequence[tuple[Any, Any, Sequence[float]]],
        categories: Mapping[Any, str],
        split: str = "train",
        change: Callable[[dict[str, Any]], None] = lambda form: None,
    ) -> Path:
        """Write a COCO split, a pair of `instances_SPLIT.json` and images.

        `boxes` are image id, category id and bbox; `change` edits the content of the file.
        """
        ids = list(dict.fromkeys(image for image, *_ in boxes))
        for number, image in enumerate(ids):
            self.picture(f"{split}/{image}.jpg", seed=number)
        form = {
            "images": [{"id": i, "file_name": f"{i}.jpg", "width": SIZE[0], "height": SIZE[1]} for i in ids],
            "annotations": [
                {"id": number, "image_id": image, "category_id": category, "bbox": list(bbox)}
                for number, (image, category, bbox) in enumerate(boxes)
            ],
            "categories": [{"id": number, "name": name} for number, name in categories.items()],
        }
        change(form)
        self.text(f"annotations/instances_{split}.json", json.dumps(form))
        return self.root

    def yolo(self, yaml: str, labels: Mapping[str, str | None], name: str = "data.yaml") -> Path:
        """Write a YOLO set; `labels` has the text of a label file by the path of its image."""
        self.text(name, yaml)
        for number, (image, text) in enumerate(labels.items()):
            self.picture(image, seed=number)
            if text is not None:
                folders, _, file = image.rpartition("images/")
                self.text(f"{folders}labels/{Path(file).with_suffix('.txt')}", text)
        return self.root

    def shards(self, kind: str, **settings: Any) -> str:
        """Prepare the folder as that kind of set; returns the URI of its shards."""
        config = DataConfig(**{"processes": 1, "max_bad_fraction": 0.9, **settings})
        return shards_of(f"{kind}:{self.root}", self.root.parent / "data", config).uri

    def read(self, kind: str, split: str = "train", **settings: Any) -> ShardDataset:
        """Return a prepared split, as a training or an evaluation reads it."""
        return ShardDataset(self.shards(kind, **settings), split)


@pytest.fixture
def sets(tmp_path: Path) -> Sets:
    """A maker of data sets, in an empty folder."""
    return Sets(tmp_path / "set")
