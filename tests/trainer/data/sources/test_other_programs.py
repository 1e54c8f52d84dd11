"""Data sets that other programs wrote with their own exporters.

Each program needs an environment of its own: KUBEDET_TEST_TOOLS names a folder of environments that
are called as their packages (supervision, label-studio-sdk and so on). Without it these tests are skipped.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from labelling_tools import CLASSES, SIZE, TRUTH

from trainer.config.schema import DataConfig
from trainer.data import sources
from trainer.data.download import plan
from trainer.data.images import SHARES_UPRIGHT

WRITER = Path(__file__).parents[3] / "support" / "labelling_tools.py"
SPLITS = {
    split: {Path(name).stem: boxes for name, boxes in images.items()} for split, images in TRUTH.items()
}
TOGETHER = {"train": SPLITS["train"] | SPLITS["val"]}

FORMS = [
    ("supervision", "yolo", SPLITS), ("supervision", "coco", SPLITS), ("supervision", "voc", SPLITS),
    ("label-studio-sdk", "coco", TOGETHER), ("label-studio-sdk", "coco-local", TOGETHER),
    ("label-studio-sdk", "yolo", TOGETHER), ("label-studio-sdk", "voc", TOGETHER),
    ("datumaro", "coco_instances", SPLITS), ("datumaro", "voc_detection", SPLITS),
    ("datumaro", "yolo", SPLITS), ("datumaro", "yolo_ultralytics", SPLITS),
    ("fiftyone", "yolo", SPLITS), ("fiftyone", "coco", SPLITS), ("fiftyone", "voc", SPLITS),
    ("labelImg", "voc", SPLITS), ("labelImg", "yolo", SPLITS),
]  # fmt: skip


pytestmark = pytest.mark.extra


@pytest.fixture
def written(tmp_path):
    """Let a program write the data set; return its folder."""

    def write(tool: str, form: str) -> Path:
        python = Path(os.environ.get("KUBEDET_TEST_TOOLS", "/nowhere")) / tool / "bin" / "python"
        if not python.exists():
            pytest.skip(f"KUBEDET_TEST_TOOLS names no folder with an environment {tool}")
        folder = tmp_path / "work" / "set"
        folder.parent.mkdir()
        environment = {**os.environ, "PYTHONPATH": "", "FIFTYONE_DO_NOT_TRACK": "1"}
        command = [str(python), str(WRITER), tool, form, str(folder)]
        subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
        return folder

    return write


def boxes_of(text: str) -> dict[str, dict[str, list]]:
    """Class and box in pixels of each image of each split, by the last part of its stem."""
    listing = sources.parse(text).listing()
    boxes: dict[str, dict[str, list]] = {}
    for split, rows in listing.splits.items():
        for row in (row for batch in rows.batches() for row in batch.to_pylist()):
            assert not row["fault_reason"]
            unit = SIZE if (row["width"], row["height"]) == SHARES_UPRIGHT else (1, 1)
            stem = Path(row["file_name"]).stem.rpartition("_")[2]
            boxes.setdefault(split, {})[stem] = [
                (
                    listing.categories[box["category"]].name,
                    [box[axis] * unit[place % 2] for place, axis in enumerate("xywh")],
                )
                for box in row["boxes"]
            ]
    assert listing.problems.counts == {}
    return boxes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "form", "splits"), FORMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_set_of_another_program_is_read_as_it_was_meant(written, tmp_path, tool, form, splits):
    folder = written(tool, form)
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    # Some count VOC's corners from 0: they are a pixel off (see voc.py).
    slack = 1.01 if "voc" in form else 0.01
    for text in (str(folder), *([] if form == "coco-local" else [packed])):
        boxes = boxes_of(text)
        assert {split: images.keys() for split, images in boxes.items()} == {
            split: images.keys() for split, images in splits.items()
        }
        for split, images in splits.items():
            for stem, expected in images.items():
                assert [label for label, _ in boxes[split][stem]] == [label for label, _ in expected]
                for (_, box), (_, true_box) in zip(boxes[split][stem], expected, strict=True):
                    assert box == pytest.approx(true_box, abs=slack)
        planned = plan(text, str(tmp_path / "data"), DataConfig())
        assert [category.name for category in planned.categories] == CLASSES
