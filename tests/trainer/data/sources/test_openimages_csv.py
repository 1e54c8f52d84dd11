import csv
import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from source_rows import rows_of

from trainer.data.sources import openimages
from trainer.data.sources.openimages import Meaning, read_boxes
from trainer.data.sources.source import Category, Rows

SHARED = Path(__file__).parents[5] / "shared" / "data"
CORNERS = ("XMin", "XMax", "YMin", "YMax")
HEADER = "ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf\n"


def read(uri: Path, categories: list[Category]) -> list[dict]:
    meaning = Meaning(categories, categories, {})
    return rows_of(
        Rows(partial(read_boxes, str(uri), "s3://images", categories, meaning, meaning, None, "", ""))
    )


def dictionaries(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def ids_of(rows: list[dict]) -> list[str]:
    return [json.loads(row["original_id"]) for row in rows]


@pytest.mark.skipif(not (SHARED / "openimages_csv").is_dir(), reason="needs the genuine rows")
@pytest.mark.parametrize("split", ["train", "test"])
def test_genuine_rows(split):
    path = SHARED / "openimages_csv" / f"{split}-annotations-bbox.csv"
    genuine = dictionaries(path)
    mids = sorted({row["LabelName"] for row in genuine})
    entries = read(path, [Category(f"class {number}", mid) for number, mid in enumerate(mids)])
    genuine.sort(key=lambda row: row["ImageID"])
    assert ids_of(entries) == list(dict.fromkeys(row["ImageID"] for row in genuine))
    boxes = [one for row in entries for one in row["boxes"]]
    assert [mids[one["category"]] for one in boxes] == [row["LabelName"] for row in genuine]
    crowds = Counter(int(row["IsGroupOf"] == "1") for row in genuine)
    assert Counter(one["iscrowd"] for one in boxes) == crowds and crowds[1] > 0
    corners = [[one["x"], one["x"] + one["w"], one["y"], one["y"] + one["h"]] for one in boxes]
    genuine_corners = [[float(row[name]) for name in CORNERS] for row in genuine]
    np.testing.assert_allclose(corners, genuine_corners, atol=1e-12)


@pytest.mark.parametrize("sortable", [0, 2**30])
def test_images_are_whole_wherever_a_block_ends(tmp_path, monkeypatch, sortable):
    cat = [Category("Cat", "/m/01yrx")]
    counts = [1, 7, 1, 30, 2, 2, 200, 1]
    rows = [f"{image:016x},/m/01yrx,0.{number:03},1,0,1,0\n" for image, count in enumerate(counts)
            for number in range(count)]  # fmt: skip
    (tmp_path / "x.csv").write_text(HEADER + "".join(rows))
    monkeypatch.setattr(openimages, "_SORTABLE", sortable)
    for size in (64, 300, 1000, 10**6):
        monkeypatch.setattr("trainer.data.sources.openimages._BLOCK", size)
        entries = read(tmp_path / "x.csv", cat)
        assert [len(row["boxes"]) for row in entries] == counts
        starts = [[box["x"] for box in row["boxes"]] for row in entries]
        assert starts == [[number / 1000 for number in range(count)] for count in counts]


def test_fields_that_are_empty_or_unknown(tmp_path):
    lines = ["a,/m/01yrx,,1,0,1,-1", "b,,0,1,0,1,", "c,/m/x,0,1,0,1,1"]
    (tmp_path / "x.csv").write_text(HEADER + "\n".join(lines))
    first, second, third = (
        row["boxes"][0] for row in read(tmp_path / "x.csv", [Category("Cat", "/m/01yrx")])
    )
    assert first["x"] != first["x"] and (first["category"], first["iscrowd"]) == (0, 0)
    assert (second["category"], second["iscrowd"], third["category"], third["iscrowd"]) == (-1, 0, -1, 1)


def test_no_boxes_at_all(tmp_path):
    (tmp_path / "x.csv").write_text(HEADER)
    assert read(tmp_path / "x.csv", [Category("Cat", "/m/01yrx")]) == []


def test_what_a_box_counts_for():
    described = [Category(name, f"/m/{name}") for name in "abcd"]
    meaning = Meaning(described, [described[2], described[0]], {"/m/d": {"/m/a", "/m/c"}, "/m/c": {"/m/b"}})
    rows, labels = meaning.apply(pa.array(["/m/a", "/m/b", "/m/other", "/m/d", None, "/m/c"]))
    assert list(zip(rows.tolist(), labels.tolist(), strict=True)) == [
        (0, 1), (2, -1), (3, 1), (3, 0), (4, -1), (5, 0),
    ]  # fmt: skip
