"""The page of the local server in a browser, on a desktop and a phone."""

import browser
import pytest
from served_page import BOXES, boxes, drop, jpeg

pytestmark = [pytest.mark.slow, browser.needed, pytest.mark.extra]


def test_detections_of_a_dropped_image(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    # The class is called `dog <b>`: it is shown as text.
    assert boxes(page) == ["dog <b> 0.72: 24, 12, 96, 60"]
    assert page.locator(f"{BOXES} text").text_content() == "dog <b> 0.72"


def test_the_minimum_score_filters_boxes_without_a_request(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    before = len(visit.requests)
    for score, shown in (("0.9", 0), ("0.73", 0), ("0.72", 1)):
        page.fill("#least", score)
        assert page.locator(BOXES).count() == len(boxes(page)) == shown
    assert len(visit.requests) == before


def test_several_images_with_a_damaged_one(visit):
    page = visit(allowed="status of 400")
    drop(page, ("a.jpg", jpeg()), ("junk.jpg", b"junk"), ("dark.jpg", jpeg(color="black")))
    assert page.locator("figure").count() == 2 and len(boxes(page)) == 1
    assert "processed 2 images; junk.jpg: the image: not an image" in page.inner_text("#message")


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
