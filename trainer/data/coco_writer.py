"""Writes a COCO set image by image: annotations/instances_<split>.json and images/<split>/."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

from trainer.data.sources.source import Category


class WrittenBox(NamedTuple):
    """A box of a set that is written."""

    name: str
    """Of the class."""
    bbox: tuple[float, ...]
    """[x, y, width, height] in pixels of the image as it is displayed."""
    area: float
    """Square pixels; 0 where nobody said it."""
    iscrowd: int


class CocoWriter:
    """A set that grows; ids of images and annotations count on through all splits."""

    def __init__(self, folder: Path, categories: Sequence[Category], info: dict[str, Any]) -> None:
        """Begin it.

        Args:
            folder: an empty one.
            categories: with ids that are integers.
            info: what the files say of themselves.
        """
        self._folder, self._info = folder, info
        self._categories = [{"id": item.original_id, "name": item.name} for item in categories]
        self._ids = {item.name: item.original_id for item in categories}
        self._parts: dict[str, tuple[IO[str], IO[str]]] = {}
        self._names: set[tuple[str, str]] = set()
        self.images: dict[str, int] = {}
        """Images of each split."""
        self.boxes: dict[str, int] = {}
        """Boxes of each split."""

    def add(
        self,
        split: str,
        name: str,
        data: bytes,
        size: tuple[int, int],
        boxes: Sequence[WrittenBox],
        digest: str,
    ) -> str:
        """Write an image with its boxes.

        Args:
            split: train, val or test.
            name: relative, with forward slashes; it gets a part of the digest where it is taken.
            data: of the file.
            size: width and height as it is displayed.
            boxes: its boxes.
            digest: of the data, in hexadecimal.

        Returns:
            The name that it has.
        """
        name = self._free(split, name, digest)
        path = self._folder / "images" / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if split not in self._parts:
            self._parts[split] = _temporary(), _temporary()
            self.images[split] = self.boxes[split] = 0
        images, annotations = self._parts[split]
        image_id = sum(self.images.values()) + 1
        entry = {"id": image_id, "file_name": name, "width": size[0], "height": size[1]}
        images.write(f"{_separator(self.images[split])}{json.dumps(entry)}")
        self.images[split] += 1
        for box in boxes:
            annotation = {
                "id": sum(self.boxes.values()) + 1, "image_id": image_id, "category_id": self._ids[box.name],
                "bbox": list(box.bbox), "area": box.area or box.bbox[2] * box.bbox[3], "iscrowd": box.iscrowd,
            }  # fmt: skip
            annotations.write(f"{_separator(self.boxes[split])}{json.dumps(annotation)}")
            self.boxes[split] += 1
        return name

    def finish(self) -> None:
        """Write the annotations of all splits."""
        (self._folder / "annotations").mkdir()
        for split, parts in self._parts.items():
            path = self._folder / "annotations" / f"instances_{split}.json"
            with path.open("w", encoding="utf-8") as file:
                head = json.dumps({"info": self._info, "categories": self._categories})
                file.write(f'{head[:-1]}, "images": [')
                for part, after in zip(parts, ('], "annotations": [', "]}\n"), strict=True):
                    part.seek(0)
                    while block := part.read(1 << 20):
                        file.write(block)
                    part.close()
                    file.write(after)

    def _free(self, split: str, name: str, digest: str) -> str:
        # Some file systems do not tell capitals from small letters.
        key, path = (split, name.casefold()), PurePosixPath(name)
        for length in range(8, len(digest) + 1):
            if key not in self._names:
                break
            name = str(path.with_name(f"{path.stem}-{digest[:length]}{path.suffix}"))
            key = (split, name.casefold())
        self._names.add(key)
        return name


def _temporary() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8")


def _separator(before: int) -> str:
    return ",\n" if before else "\n"
