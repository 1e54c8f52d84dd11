"""The boxes of a COCO JSON, brought together by image: in any order, and in little memory."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.data import problem_counts as reasons
from trainer.data.sources import coco_json, coco_rows
from trainer.data.sources.coco import CocoSource


def listing(path: Path):
    return CocoSource(str(path)).listing()


def rows_of(rows) -> list[dict]:
    """All rows of a split."""
    return [row for batch in rows.batches() for row in batch.to_pylist()]


def test_ids_of_any_kind(make_coco, edit_json):
    root = make_coco(train=["a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"])
    ids = [-1, -2, "7", 7, 2**63 - 1]

    def change(form):
        for image, one in zip(form["images"], ids, strict=True):
            image["id"] = one
        form["annotations"] = [
            {"image_id": one, "category_id": 3, "bbox": [place, 0, 1, 1]}
            for place, one in [*enumerate(ids), *enumerate(ids, 10)]
        ]

    edit_json(root / "annotations" / "instances_train.json", change)
    rows = rows_of(listing(root).splits["train"])
    assert [json.loads(row["original_id"]) for row in rows] == ids
    assert [[box["x"] for box in row["boxes"]] for row in rows] == [[n, n + 10] for n in range(5)]


def test_rows_are_the_same_wherever_parts_and_blocks_end(make_coco, edit_json, monkeypatch):
    root = make_coco(train=[f"{number}.jpg" for number in range(23)])

    def change(form):
        form["annotations"] = [dict(box) for box in 3 * form["annotations"]]
        random.Random(5).shuffle(form["annotations"])
        for place, box in enumerate(form["annotations"]):
            box["bbox"] = [place, 0, 1, 1]
        form["images"].append({**form["images"][4], "id": 7})
        form["annotations"].append({"image_id": 8, "category_id": 3, "bbox": [1, 2, 3, 4]})

    edit_json(root / "annotations" / "instances_train.json", change)
    before = rows_of(listing(root).splits["train"])
    assert [len(row["boxes"]) for row in before] == [6] * 23
    assert all(row["boxes"] == sorted(row["boxes"], key=lambda box: box["x"]) for row in before)
    for rows, parts, pending in ((2, 3, 7), (5, 1, 1), (23, 1, 1000)):
        monkeypatch.setattr(coco_rows, "ROWS", rows)
        monkeypatch.setattr(coco_json, "ROWS", rows)
        monkeypatch.setattr(coco_rows, "_PART", parts * rows)
        monkeypatch.setattr(coco_rows, "_PENDING", pending)
        listed = listing(root)
        for _ in range(2):  # Again and again; what was wrong is counted once.
            assert rows_of(listed.splits["train"]) == before
            assert listed.problems.counts == {reasons.IMAGE_LISTED_TWICE: 1, reasons.BOX_UNKNOWN_IMAGE: 1}


@pytest.mark.slow
def test_memory_does_not_grow_with_images_and_boxes(tmp_path):
    """Five times as many images and boxes take no more than their twenty bytes an image."""
    peaks = []
    for count in (10_000, 50_000):
        path = tmp_path / f"{count}.json"
        with path.open("w") as file:
            file.write('{"categories": [{"id": 1, "name": "x"}], "images": [')
            file.write(",".join(f'{{"id": {n}, "file_name": "{n}.jpg", "coco_url": "http://x/{n}.jpg"}}'
                                for n in range(count)))  # fmt: skip
            file.write('], "annotations": [')
            file.write(",".join(f'{{"image_id": {n * 7919 % count}, "category_id": 1, "bbox": [1, 2, 3, 4]}}'
                                for n in range(4 * count)) + "]}")  # fmt: skip
        boxes, peak = boxes_and_peak(path, "coco_rows._PENDING, coco_rows._PART = 2000, 2000")
        assert boxes == 4 * count
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 12  # Megabytes, for 40,000 images and 160,000 boxes.


@pytest.mark.slow
def test_memory_does_not_grow_with_segmentations(tmp_path):
    """A file that takes 400 MB as objects, read in a process of its own whose peak is measured."""
    path = tmp_path / "x.json"
    polygon = ",".join(f"{number / 8:.2f}" for number in range(800))
    with path.open("w") as file:
        file.write('{"categories": [{"id": 1, "name": "x"}], "annotations": [')
        for number in range(12_000):
            box = f'"id": {number}, "image_id": {number % 1000}, "category_id": 1, "bbox": [1, 2, 3, 4]'
            file.write(f'{{{box}, "area": 12, "segmentation": [[{polygon}]]}},')
        file.write(f'{{{box}}}], "images": [')
        images = (
            f'{{"id": {n}, "file_name": "{n}.jpg", "coco_url": "http://x/{n}.jpg"}}' for n in range(1000)
        )
        file.write(",".join(images) + "]}")
    boxes, peak = boxes_and_peak(path)
    assert path.stat().st_size > 50e6 and boxes == 12_001
    assert peak < 200


def boxes_and_peak(path: Path, before: str = "") -> tuple[int, int]:
    """Boxes of a file, and the most memory that a process takes to read it, in megabytes."""
    code = (
        "import re, sys; from trainer.data.sources import coco_rows\n"
        "from trainer.data.sources.coco import CocoSource\n"
        f"{before}\n"
        "boxes = sum(len(batch['boxes'].flatten()) for batch in "
        "CocoSource(sys.argv[1]).listing().splits['train'].batches())\n"
        "print(boxes, int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    boxes, peak = map(int, done.stdout.split())
    return boxes, peak
