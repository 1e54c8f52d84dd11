import base64
import hashlib
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
from PIL import Image

from trainer.evaluation import coco
from trainer.evaluation.coco import CocoResult
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metrics import BaselineComparison, Change
from trainer.evaluation.scoring import Scores
from trainer.report import evaluation_page
from trainer.report.evaluation_page import ReportData
from trainer.report.figures import thumbnail_uri
from trainer.report.gallery import GalleryImage, MarkedBox

NAMES = ["cat", "<script>alert(1)</script> | *x*"]


def scores(per_class, **changes):
    """Scores with these rows of classes, and flat curves."""
    values = {
        "coco": CocoResult({}, per_class, np.full((10, 101, len(per_class)), 0.5)),
        "metrics": dict.fromkeys(coco.METRICS, 0.25) | {"coco/APs": -1.0},
        "matches": SimpleNamespace(rows=[0]),
        "operating_points": {},
        "confusion": None,
    }
    return Scores(**(values | changes))


def row(ap, boxes=1, **changes):
    return {"AP": ap, "AP50": ap, "APs": ap, "APm": -1.0, "APl": ap, "boxes": boxes} | changes


def image(truth=(), predictions=()):
    return GalleryImage(
        3, "a&b.jpg", 1200, 900, thumbnail_uri(Image.new("RGB", (1200, 900)), 560), truth, predictions
    )


def data(per_class=None, changed=None, **changes):
    rows = per_class or {NAMES[0]: row(0.3, 4, AP50=0.5), NAMES[1]: row(-1.0, 0)}
    values = {
        "title": "run <b>7</b>",
        "split": "test",
        "images": 1200,
        "scores": scores(rows, **(changed or {})),
        "verdict": Verdict(passed=False, reason="coco/AP 0.250 >= 0.3: failed"),
        "training": [{"kind": "train", "step": 1, "loss": 1.0, "lr": 0.1}],
        "gallery": [
            image(
                (MarkedBox((10, 20, 30, 40), "cat", matched=False),),
                (MarkedBox((500, 20, 30, 40), "dog", matched=False, score=0.77),),
            )
        ],
        "config": {"train": {"lr": 0.01, "milestones": [0.5, 0.75]}, "recipe": "debug"},
        "versions": {"torch": "2.15.0"},
    }
    return ReportData(**(values | changes))


class Page(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = frozenset({"meta", "br", "input", "image", "rect", "path", "polyline", "use"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text


def test_page_needs_nothing_from_outside_and_runs_its_own_script_only():
    text = evaluation_page.render_html(data())
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"link", "iframe", "img", "object"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href", "xlink:href") if key in attrs]
    assert sources and all(source.startswith(("data:image/jpeg;base64,", "#")) for source in sources)
    policy = next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'") and policy.endswith(f"script-src 'sha256-{digest}'")
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)


def test_page_shows_everything():
    page = Page(evaluation_page.render_html(data()))
    for text in (
        "run <b>7</b>",
        "1,200 images of the test split, 4 boxes, 2 classes",
        "Gate failed",
        "coco/AP 0.250 >= 0.3: failed",
        "AR100",
        "0.250",
        NAMES[1],
        "Loss",
        "a&b.jpg",
        "1 object, 1 missed; 1 false",
        "train.milestones",
        "[0.5, 0.75]",
        "2.15.0",
        "dog 0.77",
    ):
        assert text in page.text, text
    assert "-1.000" not in page.text
    boxes = {attrs["class"] for tag, attrs in page.tags if tag == "rect" and "class" in attrs}
    assert boxes == {"missed truth", "false found"}


def test_markdown():
    text = evaluation_page.render_markdown(data())
    lines = text.splitlines()
    assert lines[0] == "# run &lt;b>7&lt;/b>"
    assert "**Gate failed**" in lines and "- coco/AP 0.250 >= 0.3: failed" in lines
    assert "| coco/AP | 0.250 | mean over IoU 0.50 to 0.95 |" in lines
    assert "| coco/APs | - | small objects, below 32 x 32 px |" in lines
    assert r"| &lt;script>alert(1)&lt;/script> \| \*x\* | 0 | - | - |" in lines
    many = {f"c{i}": row(0.1) for i in range(601)}
    assert "551 more classes are in the HTML report." in evaluation_page.render_markdown(data(many))


def test_markdown_shows_the_comparison_and_the_weakest_classes_first():
    aps = {"cat": 0.3, "dog": 0.1, "owl": 0.2, "none": -1.0}
    rows = {name: row(ap) for name, ap in aps.items()}
    changes = {
        "coco/AP": Change(0.2, 0.25, -0.01, 0.11),
        "AP[cat]": Change(0.1, 0.3, 0.1, 0.3, "better"),
        "AP[dog]": Change(0.0, 0.1, 0.05, 0.2, "too few to tell"),
        "AP[owl]": Change(0.4, 0.2, -0.3, -0.1, "worse"),
    }
    report = data(rows, comparison=BaselineComparison("run *7*", changes, 200))
    lines = evaluation_page.render_markdown(report).splitlines()
    assert (
        r"Against the baseline run \*7\*: coco/AP +0.0500, with 95 % confidence from -0.0100 to +0.1100: "
        "not sure. Classes: 1 better, 1 worse, 0 not sure, 1 too few to tell."
    ) in lines
    assert [line.split(" | ")[0] for line in lines[-4:]] == ["| dog", "| owl", "| cat", "| none"]
