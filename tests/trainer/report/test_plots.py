import re
from xml.etree import ElementTree

import numpy as np

from trainer.evaluation.coco import CocoResult
from trainer.report import plots

PER_CLASS = {
    "cat": {"AP": 0.4, "AP50": 0.6, "boxes": 3},
    "no boxes": {"AP": -1.0, "AP50": -1.0, "boxes": 0},
    "$x_1$ <dog>": {"AP": 0.1, "AP50": 0.2, "boxes": 5},
}


def draw(per_class):
    precision = np.random.default_rng(0).random((10, 101, len(per_class)))
    return plots.plot_precision_recall(CocoResult({}, per_class, precision))


def test_svg_takes_size_and_colors_from_the_page():
    plot = draw(PER_CLASS)
    root = ElementTree.fromstring(plot.svg)
    assert [label for _, label in plot.legend] == ["cat", "$x_1$ <dog>", "mean"] and "dog" not in plot.svg
    assert root.get("width") is None and root.get("height") is None and root.get("viewBox")
    assert not re.search(r"#[0-9a-f]{6}\b", plot.svg)
    assert {"var(--text)", "var(--grid)", "var(--series-1)", "var(--series-2)"} <= set(
        re.findall(r"var\([^)]*\)", plot.svg)
    )
    assert "<style" not in plot.svg and "http:" not in plot.svg.replace("http://www.w3.org", "")


def test_many_classes_show_the_weakest_and_stay_small():
    per_class = {f"c{i}": {"AP": i / 601, "AP50": i / 601, "boxes": 1} for i in range(601)}
    plot = draw(per_class)
    labels = [label for _, label in plot.legend]
    assert labels == ["c0", "c1", "c2", "c3", "c4", "middle 80 % of 601 classes", "mean"]
    assert len(plot.svg) < 60_000
