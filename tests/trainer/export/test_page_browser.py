"""The page of the local server in a browser: images, on a desktop and a phone."""

import json

import browser
import pytest
from served_page import BOXES, ROWS, boxes, drop, jpeg

pytestmark = [pytest.mark.slow, browser.needed, pytest.mark.extra]


def test_detections_of_a_dropped_image(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    # The class is called `dog <b>`: it is shown as text.
    assert boxes(page) == [("dog <b>", "24, 12, 96, 60")]
    assert page.locator("#boxes text").text_content() == "dog <b> 0.72" and page.locator(BOXES).count() == 1
    assert page.inner_text("#count").startswith("1 found, 0 below")


def test_least_score_and_classes_filter_boxes_without_a_request(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    before = len(visit.requests)
    for least, shown in (("0.9", 0), ("0.73", 0), ("0.72", 1)):
        page.fill("#least", least)
        assert page.locator(BOXES).count() == page.locator(ROWS).count() == shown
    page.get_by_label("dog <b>", exact=True).uncheck()
    assert page.locator(BOXES).count() == 0
    page.get_by_label("dog <b>", exact=True).check()
    assert page.locator(BOXES).count() == 1
    assert len(visit.requests) == before


def test_several_images_with_a_damaged_one(visit):
    page = visit(allowed="status of 400")
    drop(page, ("a.jpg", jpeg()), ("junk.jpg", b"junk"), ("dark.jpg", jpeg(color="black")))
    notes = page.locator("#images li span:last-child").all_inner_texts()
    assert notes == ["1 found", "failed", "0 found"]
    assert "looked at 2 of 3 images; junk.jpg: the image: not an image" in page.inner_text("#message")
    page.keyboard.press(".")
    assert page.inner_text("#name") == "junk.jpg" and "failed" in page.inner_text("#count")
    page.keyboard.press(".")
    assert page.inner_text("#name") == "dark.jpg"
    page.get_by_role("button", name="Next image").click()
    assert page.inner_text("#name") == "a.jpg"


def test_images_can_be_removed(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()), ("b.jpg", jpeg(size=(96, 96))), ("c.jpg", jpeg()))
    page.keyboard.press(".")
    page.get_by_role("button", name="Remove the image").click()
    assert page.locator("#images li span:nth-of-type(1)").all_inner_texts() == ["a.jpg", "c.jpg"]
    assert page.inner_text("#name") == "c.jpg"
    for _ in range(2):
        page.get_by_role("button", name="Remove the image").click()
    assert page.locator("#work").is_hidden() and page.evaluate("document.activeElement.id") == "file"
    drop(page, ("d.jpg", jpeg()))
    assert page.inner_text("#name") == "d.jpg" and page.locator(BOXES).count() == 1


def test_detections_are_copied_as_json(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    drop(page, ("a.jpg", jpeg()))
    page.get_by_role("button", name="Copy as JSON").click()
    page.locator("#message", has_text="copied").wait_for()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert (copied["model"], copied["image"], copied["width"], copied["least_score"]) == (
        "pets v1",
        "a.jpg",
        192,
        0.3,
    )
    assert copied["detections"][0]["box"] == [24, 12, 96, 60]


CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true});
  const seen = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(part => part.nodeType === 3 && part.textContent.trim());
    if (!own || node.closest("svg") || node.disabled || !node.checkVisibility()) continue;
    let holder = node;
    while (holder && seen(getComputedStyle(holder).backgroundColor)[3] < 255) holder = holder.parentElement;
    const pair = [getComputedStyle(node).color, getComputedStyle(holder ?? document.body).backgroundColor];
    const [one, other] = pair.map(color => luminance(seen(color))).sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    const text = node.textContent.trim().slice(0, 30);
    if (ratio < 4.5) poor.push(`${node.tagName} ${text}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex]")]
  .filter(node => node.checkVisibility() && !(node.getAttribute("aria-label") || node.labels?.length ||
    node.textContent.trim() || document.querySelector(`label[for="${node.id}"]`)))
  .map(node => node.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_labels_and_width_on_a_desktop_and_a_phone(visit, scheme):
    page = visit(color_scheme=scheme)
    for state in ("empty", "images"):
        if state == "images":
            drop(page, ("x" * 90 + ".jpg", jpeg()), ("a.jpg", jpeg(size=(60, 300))))
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (state, width)
            assert page.evaluate(CONTRAST) == [], (state, width)
            assert page.evaluate(UNNAMED) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)")
