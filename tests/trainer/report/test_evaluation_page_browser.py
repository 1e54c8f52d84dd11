"""The report in a real browser: nothing to complain about, and a table that sorts."""

import browser
import numpy as np
import pytest

from tests.trainer.report.test_evaluation_page import data, row
from trainer.evaluation import scoring
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metrics import BaselineComparison, Change
from trainer.report import evaluation_page

pytestmark = [browser.needed, pytest.mark.slow, pytest.mark.extra]

CLASSES = {"person": 0.5, "dog": 0.1, "cat": 0.3, "<i>tv</i>": 0.2, "nothing": -1.0}
CHANGES = {
    "coco/AP": Change(0.2, 0.25, 0.01, 0.09, "better"),
    "coco/AP50": Change(0.2, 0.25, -0.01, 0.09),
    "AP[person]": Change(0.4, 0.5, 0.05, 0.15, "better"),
    "AP[dog]": Change(0.3, 0.1, -0.3, -0.1, "worse"),
    "AP[cat]": Change(0.3, 0.3, -0.1, 0.1),
    "AP[<i>tv</i>]": Change(0.2, 0.2, 0.0, 0.0, "too few to tell"),
}
NAMES = "Array.from(document.querySelectorAll('#classes tbody td.name'), e => e.textContent)"


def write(path, classes):
    """Write a report about classes with these APs; returns its URI."""
    rows = {name: row(ap, 10 * i) for i, (name, ap) in enumerate(classes.items())}
    whole = data(
        rows,
        verdict=Verdict(passed=False, reason=f"AP[*] >= 0.2: failed by {', '.join(classes)}"),
        comparison=BaselineComparison("detector 7", CHANGES, 200),
        changed={
            "operating_points": {name: scoring.OperatingPoint(0.4, 0.7) for name in classes},
            "confusion": scoring.ConfusionMatrix(
                [*list(classes)[:2], "background"], np.arange(9).reshape(3, 3)
            ),
        },
    )
    path.write_text(evaluation_page.render_html(whole))
    return path.as_uri()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "report.html", CLASSES)


def test_the_table_sorts_without_complaints(url):
    with browser.page(url) as (page, heard):
        assert page.evaluate(NAMES) == ["dog", "<i>tv</i>", "cat", "person", "nothing"]
        page.click("th[data-key=AP] button")  # It was ascending; without a value stays last.
        assert page.evaluate(NAMES) == ["person", "cat", "<i>tv</i>", "dog", "nothing"]
        page.click("th[data-key=name] button")
        assert page.evaluate(NAMES) == ["<i>tv</i>", "cat", "dog", "nothing", "person"]
        page.click("th[data-key=boxes] button")
        page.click("th[data-key=boxes] button")
        assert page.evaluate(NAMES) == ["nothing", "<i>tv</i>", "cat", "dog", "person"]
        assert page.evaluate("document.querySelector('th[data-key=boxes]').ariaSort") == "descending"
        assert heard.complaints == [] and heard.requests == [url]


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_the_readers_colors(tmp_path, dark):
    url = write(tmp_path / "report.html", {"x" * 60: 0.1, **CLASSES})
    with browser.page(url, width=390, dark=dark) as (page, heard):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("table.parentElement.scrollWidth - table.parentElement.clientWidth") <= 0
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(18, 22, 28)" if dark else "rgb(246, 247, 249)")
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert (tmp_path / "page.png").stat().st_size > 10_000
        assert heard.complaints == []
