import csv
import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import source_rows
from openimages_mirror import BOX_COLUMNS, BOX_ROWS, IDS, MIDS, box, source, write_csv

from trainer.base.errors import DataError
from trainer.data import sources
from trainer.data.images import STORED_SHARES
from trainer.data.sources import openimages
from trainer.data.sources.openimages import (
    BOXES,
    CLASSES,
    DESCRIPTIONS,
    HIERARCHY,
    LABELS,
    CategoryLookup,
    read_boxes,
)
from trainer.data.sources.source import UNKNOWN, Category, Rows


def rows_of(mirror: Path | str, text: str = "") -> dict[str, list[dict]]:
    splits = source(mirror, text).listing().splits
    return {split: source_rows.rows_of(rows) for split, rows in splits.items()}


def labels(row: dict) -> list[int]:
    return [box["category"] for box in row["boxes"]]


def test_what_a_row_tells(mirror):
    listing = source(mirror).listing()
    assert [tuple(category)[:2] for category in listing.categories] == list(MIDS.items())
    assert list(listing.splits) == ["train", "val", "test"] and not listing.exhaustive
    first = rows_of(mirror)["train"][0]
    cat, crowd = first.pop("boxes")
    assert first == {
        "file_name": "000002b66c9c498e.jpg",
        "version": "",
        "width": STORED_SHARES[0],
        "height": STORED_SHARES[1],
        "origin": f"{mirror}/pixels/train/000002b66c9c498e.jpg",
        "original_id": '"000002b66c9c498e"',
        "fault_reason": "",
        "fault_detail": "",
        "extra": "",
    }
    assert [cat[name] for name in "xywh"] == pytest.approx([0.1, 0.2, 0.5, 0.7])
    assert (cat["category"], cat["iscrowd"], crowd["category"], crowd["iscrowd"]) == (1, 0, 4, 1)
    assert source(mirror).read(first["origin"]) == Path(first["origin"]).read_bytes()


def test_unknown_classes_are_told_and_verified_ones_are_kept(mirror):
    table_rows = rows_of(mirror)
    assert labels(table_rows["test"][1]) == [2, UNKNOWN]
    assert [row["extra"] for row in table_rows["train"]] == [""] * 4
    assert [json.loads(row["extra"])["verified"] for row in table_rows["val"]] == [
        {"Cat": 1, "Dog": 0},
        {"Dog": 0},
        {"Dog": 0, "Animal": 0},
    ]
    # The last has verified classes alone, and no row among the boxes.
    assert [len(row["boxes"]) for row in table_rows["val"]] == [1, 1, 0]
    assert [row["extra"] for row in rows_of(mirror, "labels=none")["val"]] == ["", ""]


def test_splits_and_a_list_of_images(mirror, tmp_path):
    assert list(rows_of(mirror, "splits=train+test")) == ["train", "test"]
    (lone,) = rows_of(mirror, "splits=validation").items()
    assert lone[0] == "train" and len(lone[1]) == 3
    ids = tmp_path / "ids.txt"
    ids.write_text("train/000002c707c9895e\r\n\nvalidation/0001eeaf4aed83f9\ntrain/ffffffffffffffff\n")
    table_rows = rows_of(mirror, f"images={ids}")
    names = {split: [row["original_id"].strip('"') for row in rows] for split, rows in table_rows.items()}
    assert names == {"train": ["000002c707c9895e", "ffffffffffffffff"], "val": ["0001eeaf4aed83f9"]}
    assert [len(row["boxes"]) for row in table_rows["train"]] == [1, 0]


@pytest.mark.parametrize("text", ["", "train\n", "train/../x\n", "challenge2018/000002c707c9895e\n"])
def test_lists_that_are_none(mirror, tmp_path, text):
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(DataError, match=r"ids\.txt") as caught:
        source(mirror, f"images={tmp_path}/ids.txt").listing()
    assert "train/" in caught.value.fix


@pytest.mark.parametrize("text", ["splits=val", "splits=", "subset=coco", "classes=Cat", "hierarchy"])
def test_parameters_that_do_not_exist(text):
    with pytest.raises(DataError, match="cannot use") as caught:
        sources.parse(f"openimages:{text}")
    assert "splits=train+validation+test" in caught.value.fix and "subset=all|mlperf" in caught.value.fix


def test_its_uri_means_the_same_again(mirror, monkeypatch):
    monkeypatch.chdir(mirror)
    parsed = sources.parse("openimages:subset=mlperf,base=base,splits=train")
    assert parsed.uri == f"openimages:splits=train,subset=mlperf,base={mirror}/base"
    assert sources.parse(parsed.uri) == parsed and sources.parse("openimages:").uri == "openimages:"


def test_files_that_are_missing_or_of_another_form(mirror, monkeypatch):
    (mirror / "base" / LABELS["test"]).unlink()
    with pytest.raises(DataError, match=r"no file .*oidv7-test") as caught:
        source(mirror).listing()
    assert "labels=none" in caught.value.fix
    path = mirror / "base" / BOXES["train"]
    path.write_text(path.read_text().replace("XMin", "Left"))
    with pytest.raises(DataError, match=r"cannot be read: .*XMin"):
        rows_of(mirror, "splits=train")
    path.write_text(path.read_text().replace("Left", "XMin").replace("0.75", "wide"))
    with pytest.raises(DataError, match=r"cannot be read: .*wide"):
        rows_of(mirror, "splits=train")
    write_csv(path, BOX_COLUMNS, [*BOX_ROWS["train"], BOX_ROWS["train"][0]])
    assert [labels(row) for row in rows_of(mirror, "splits=train")["train"]] == [[1, 4, 1], [2], [5], [0]]
    monkeypatch.setattr(openimages, "_SORT_BYTES", 10)
    with pytest.raises(DataError, match="are not consecutive"):
        rows_of(mirror, "splits=train")
    (mirror / "base" / HIERARCHY).unlink()
    with pytest.raises(DataError, match=r"no file .*hierarchy") as caught:
        source(mirror, "splits=train").listing()
    assert "hierarchy=none" in caught.value.fix
    assert source(mirror, "splits=train,hierarchy=none").listing().hierarchy == {}
    (mirror / "base" / HIERARCHY).write_text("[]")
    with pytest.raises(DataError, match="hierarchy"):
        source(mirror, "splits=train").listing()
    (mirror / "base" / DESCRIPTIONS).write_text("1,2,3\n")
    with pytest.raises(DataError, match="display name"):
        source(mirror, "splits=train").listing()


def test_the_subset_of_mlperf(mirror):
    assert len(set(CLASSES)) == 264
    with pytest.raises(DataError, match="describes no class Airplane"):
        source(mirror, "subset=mlperf").listing()
    described = [[f"/m/{number:04}", name] for number, name in enumerate((*CLASSES, "Animal"))]
    write_csv(mirror / "base" / DESCRIPTIONS, ["LabelName", "DisplayName"], described)
    rows = [box(IDS["train"][0], mid) for mid in ("/m/0264", "/m/0043", "/m/unheard")]
    write_csv(mirror / "base" / BOXES["train"], BOX_COLUMNS, rows)
    assert [category.name for category in source(mirror, "subset=mlperf").listing().categories] == [*CLASSES]
    (row,) = rows_of(mirror, "subset=mlperf,splits=train")["train"]
    assert labels(row) == [CLASSES.index("Cat"), UNKNOWN]


def test_the_state_follows_the_files(mirror):
    states = [source(mirror).listing().state, source(mirror).listing().state]
    with (mirror / "base" / BOXES["test"]).open("a") as file:
        file.write(",".join(map(str, box("ffffffffffffffff", "Cat"))) + "\n")
    states.append(source(mirror).listing().state)
    assert states[0] == states[1] != states[2]


HEADER = "ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf\n"
PUBLISHED = Path(__file__).parents[5] / "shared" / "data" / "openimages_csv"


def read(uri: Path, categories: list[Category]) -> list[dict]:
    lookup = CategoryLookup(categories, categories)
    return source_rows.rows_of(
        Rows(partial(read_boxes, str(uri), "s3://images", categories, lookup, None, ""))
    )


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs rows of the published file")
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_rows(split):
    path = PUBLISHED / f"{split}-annotations-bbox.csv"
    with path.open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["ImageID"])
    mids = sorted({row["LabelName"] for row in rows})
    entries = read(path, [Category(f"class {number}", mid) for number, mid in enumerate(mids)])
    ids = [json.loads(entry["original_id"]) for entry in entries]
    assert ids == list(dict.fromkeys(row["ImageID"] for row in rows))
    boxes = [box for entry in entries for box in entry["boxes"]]
    assert [mids[box["category"]] for box in boxes] == [row["LabelName"] for row in rows]
    crowds = Counter(int(row["IsGroupOf"] == "1") for row in rows)
    assert Counter(box["iscrowd"] for box in boxes) == crowds and crowds[1] > 0
    corners = [[box["x"], box["x"] + box["w"], box["y"], box["y"] + box["h"]] for box in boxes]
    expected = [[float(row[name]) for name in ("XMin", "XMax", "YMin", "YMax")] for row in rows]
    np.testing.assert_allclose(corners, expected, atol=1e-12)


@pytest.mark.parametrize("sortable", [0, 2**30])
def test_images_are_whole_wherever_a_block_ends(tmp_path, monkeypatch, sortable):
    cat = [Category("Cat", "/m/01yrx")]
    counts = [1, 7, 1, 30, 2, 2, 200, 1]
    rows = [
        f"{image:016x},/m/01yrx,0.{number:03},1,0,1,0\n"
        for image, count in enumerate(counts)
        for number in range(count)
    ]
    (tmp_path / "x.csv").write_text(HEADER + "".join(rows))
    monkeypatch.setattr(openimages, "_SORT_BYTES", sortable)
    for size in (64, 300, 1000, 10**6):
        monkeypatch.setattr("trainer.data.sources.openimages._BLOCK", size)
        entries = read(tmp_path / "x.csv", cat)
        assert [len(row["boxes"]) for row in entries] == counts
        starts = [[box["x"] for box in row["boxes"]] for row in entries]
        assert starts == [[number / 1000 for number in range(count)] for count in counts]


def test_fields_that_are_empty_or_unknown(tmp_path):
    (tmp_path / "none.csv").write_text(HEADER)
    assert read(tmp_path / "none.csv", [Category("Cat", "/m/01yrx")]) == []
    lines = ["a,/m/01yrx,,1,0,1,-1", "b,,0,1,0,1,", "c,/m/x,0,1,0,1,1"]
    (tmp_path / "x.csv").write_text(HEADER + "\n".join(lines))
    first, second, third = (
        row["boxes"][0] for row in read(tmp_path / "x.csv", [Category("Cat", "/m/01yrx")])
    )
    assert first["x"] != first["x"] and (first["category"], first["iscrowd"]) == (0, 0)
    assert (second["category"], second["iscrowd"], third["category"], third["iscrowd"]) == (-1, 0, -1, 1)


def test_which_categories_the_rows_have():
    described = [Category(name, f"/m/{name}") for name in "abcd"]
    lookup = CategoryLookup(described, [described[2], described[0]])
    rows, labels = lookup.find(pa.array(["/m/a", "/m/b", "/m/other", "/m/d", None, "/m/c"]))
    assert list(zip(rows.tolist(), labels.tolist(), strict=True)) == [(0, 1), (2, -1), (4, -1), (5, 0)]
