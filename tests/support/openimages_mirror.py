"""A small Open Images: the files of a mirror in their places, and its images."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data import sources
from trainer.data.sources.openimages import (
    BOXES,
    DESCRIPTIONS,
    HIERARCHY,
    LABELS,
    OpenImagesSource,
)

BOX_COLUMNS = [
    "ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax",
    "IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside",
]  # fmt: skip
CLICKS = [f"XClick{number}{axis}" for axis in "XY" for number in (1, 2, 3, 4)]
MIDS = {
    "Animal": "/m/0jbk", "Cat": "/m/01yrx", "Dog": "/m/0bt9lr", "Person": "/m/01g317", "Man": "/m/04yx4",
    "Tree, large": "/m/07j7r",
}  # fmt: skip
BELOW = {
    "/m/0bl9f": ["Animal", "Person", "Tree, large"],
    "Animal": ["Cat", "Dog"],
    "Person": ["Man"],
}
IDS = {
    "train": ["000002b66c9c498e", "000002b97e5471a0", "000002c707c9895e", "0000048549557964"],
    "validation": ["0001eeaf4aed83f9", "00075905539074f2", "0007cebe1b2ba653"],
    "test": ["000026e7ee790996", "000062a39995e348"],
}


def box(image_id: str, name: str, corners=(0.1, 0.6, 0.2, 0.9), group: int = 0) -> list[object]:
    return [image_id, "xclick", MIDS.get(name, name), 1, *corners, 0, 1, group, 0, -1]


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def hierarchy(name: str) -> dict:
    node: dict = {"LabelName": MIDS.get(name, name)}
    if name in BELOW:
        node["Subcategory"] = [hierarchy(child) for child in BELOW[name]]
    return node


BOX_ROWS = {
    "train": [
        box(IDS["train"][0], "Cat"),
        box(IDS["train"][0], "Man", (0.5, 0.75, 0.25, 0.5), 1),
        box(IDS["train"][1], "Dog"),
        box(IDS["train"][2], "Tree, large"),
        box(IDS["train"][3], "Animal"),
    ],
    "validation": [box(IDS["validation"][0], "Cat"), box(IDS["validation"][1], "Person")],
    "test": [box(IDS["test"][0], "Cat"), box(IDS["test"][1], "Dog"), box(IDS["test"][1], "/m/unheard")],
}


@pytest.fixture
def mirror(tmp_path: Path, make_jpeg: Callable[..., bytes]) -> Path:
    """The files of Open Images under base/ in their places, and pixels/<split>/<id>.jpg of 40x30."""
    base = tmp_path / "base"
    write_csv(base / DESCRIPTIONS, ["LabelName", "DisplayName"], [[mid, name] for name, mid in MIDS.items()])
    (base / HIERARCHY).parent.mkdir()
    (base / HIERARCHY).write_text(json.dumps(hierarchy("/m/0bl9f")))
    for split, rows in BOX_ROWS.items():
        clicks = CLICKS if split == "train" else []
        write_csv(base / BOXES[split], BOX_COLUMNS + clicks, [row + [0.5] * len(clicks) for row in rows])
        for number, image_id in enumerate(IDS[split]):
            path = tmp_path / "pixels" / split / f"{image_id}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_jpeg(seed=number))
    for split, path in LABELS.items():
        labels = [[image_id, "verification", MIDS["Dog"], 0] for image_id in IDS[split]]
        labels += [[IDS[split][0], "verification", MIDS["Cat"], 1], [IDS[split][0], "x", "/m/other", 1]]
        labels.append([IDS[split][-1], "verification", MIDS["Animal"], 0])
        write_csv(base / path, ["ImageID", "Source", "LabelName", "Confidence"], labels)
    return tmp_path


def source(mirror: Path | str, text: str = "") -> OpenImagesSource:
    """The source that reads it, with further parameters."""
    parsed = sources.parse(f"openimages:base={mirror}/base/,pixels={mirror}/pixels,{text}")
    assert isinstance(parsed, OpenImagesSource)
    return parsed
