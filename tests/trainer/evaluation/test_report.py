"""The report: whole without the network, honest about what is missing, safe with odd names."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from trainer.evaluation import coco
from trainer.evaluation.gallery import worst_images
from trainer.evaluation.gate import decide
from trainer.evaluation.report import ReportData, html, markdown, write_report
from trainer.export.preprocess import FILL

TRUTH = {
    "categories": [{"id": 0, "name": "<b>cat</b>"}, {"id": 1, "name": "dog"}],
    "images": [{"id": i, "file_name": f"{i}.jpg", "width": 100, "height": 80} for i in range(3)],
    "annotations": [
        {"id": 1, "image_id": 0, "category_id": 0, "bbox": [10, 10, 30, 30], "area": 900, "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [50, 20, 40, 40], "area": 1600, "iscrowd": 0},
        {"id": 3, "image_id": 2, "category_id": 1, "bbox": [0, 0, 100, 80], "area": 8000, "iscrowd": 1},
    ],
}
FOUND = [
    {"image_id": 0, "category_id": 0, "bbox": [10, 10, 30, 30], "score": 0.9},
    {"image_id": 0, "category_id": 1, "bbox": [60, 10, 30, 30], "score": 0.8},
    {"image_id": 2, "category_id": 1, "bbox": [5, 5, 20, 20], "score": 0.9},
]


@pytest.fixture
def data():
    import simplejpeg

    result = coco.evaluate(TRUTH, FOUND)
    rows = [
        {
            "kind": "train",
            "step": s,
            "loss": 2 / s,
            "loss_classification": 1 / s,
            "loss_boxes": 1 / s,
            "lr": 0.1,
        }
        for s in range(1, 30)
    ]
    rows.append({"kind": "val", "step": 29, "epoch": 1, **result.metrics})
    jpeg = simplejpeg.encode_jpeg(np.full((80, 100, 3), FILL, np.uint8))
    return ReportData(
        title="test run", split="test", images=3, metrics=result.metrics, per_class=result.per_class,
        precision=result.precision, verdict=decide(result.metrics, ["coco/AP50 >= 0.9"]), training=rows,
        gallery=worst_images(TRUTH, FOUND), load_image=lambda image_id: jpeg,
        dataset={"train": {"images": 5, "boxes": 9}}, config={"train": {"lr": 0.1}}, versions={"torch": "2"},
    )  # fmt: skip


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href") and value]


def test_the_page_asks_nothing_of_the_network(data):
    page = html(data)
    tags = Tags()
    tags.feed(page)
    assert all(link.startswith(("data:", "#")) for link in tags.links), tags.links
    assert not re.search(r"url\((?!['\"]?(data:|#))", page) and "@import" not in page


def test_it_shows_numbers_verdict_and_names_escaped(data):
    page = html(data)
    assert "&lt;b&gt;cat&lt;/b&gt;" in page and "<b>cat</b>" not in page
    assert f"{data.metrics['coco/AP']:.3f}" in page
    assert "coco/AP50" in page and "failed" in page
    assert "train.lr" in page


def test_both_files_are_written(data, tmp_path):
    write_report(data, tmp_path / "r.html", tmp_path / "r.md")
    assert (tmp_path / "r.html").read_text() == html(data)
    assert (tmp_path / "r.md").read_text() == markdown(data)
    assert "| dog |" in markdown(data)


def test_the_least_there_can_be(data):
    page = html(ReportData(title="x", split="val", images=3, metrics=data.metrics, per_class=data.per_class))
    assert "x" in page


def test_worst_images_count_errors_and_leave_crowds_alone():
    worst = worst_images(TRUTH, FOUND)
    assert [(image.image_id, image.missed, image.false) for image in worst] == [(1, 1, 0), (0, 0, 1)]
    assert [image.f1 for image in worst] == [0.0, pytest.approx(2 / 3)]
    assert worst_images(TRUTH, FOUND, count=1) == worst[:1]
