"""The local server's page can be read, named and reached, on a desk and on a telephone."""

import json

import browser
import pytest
from served_page import BOXES, ROWS, corrections, draw_with_keys, drop, jpeg

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, browser.needed]
CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true});
  const seen = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
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
    const [one, other] = pair.map(colour => luminance(seen(colour))).sort((a, b) => b - a);
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


def check_labels(page):
    """No label lies on another."""
    plates = [plate.bounding_box() for plate in page.locator("#boxes .plate").all()]
    assert plates
    for index, one in enumerate(plates):
        for other in plates[index + 1 :]:
            apart = abs(one["y"] - other["y"]) + 0.5 >= one["height"]
            beside = (
                one["x"] + one["width"] <= other["x"] + 0.5 or other["x"] + other["width"] <= one["x"] + 0.5
            )
            assert apart or beside


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_named_on_a_desk_and_on_a_phone(visit, scheme):
    page = visit(color_scheme=scheme)
    for state in ("empty", "images"):
        if state == "images":
            drop(page, ("x" * 90 + ".jpg", jpeg()), ("a.jpg", jpeg(size=(60, 300))))
            page.get_by_role("button", name="All boxes are right").click()
            corrections(page)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (state, width)
            assert page.evaluate(CONTRAST) == [], (state, width)
            assert page.evaluate(UNNAMED) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)")


def test_every_box_of_many_can_be_deleted_and_has_a_label_that_hides_none(visit):
    """Forty boxes, one over the other, of a name that is long."""
    page = visit()
    name, many = "a traffic light with a name that is longer than the list", []
    model = json.loads(page.evaluate("fetch('model.json').then(answer => answer.text())"))
    model["classes"][1]["name"] = name
    page.route("**/model.json", lambda route: route.fulfill(json=model))
    page.reload()
    page.get_by_role("heading", name="Try pets").wait_for()
    for number in range(40):
        corner = number * 2
        box = [corner, corner // 2, corner + 60, corner // 2 + 40]
        many.append({"label": 1, "name": name, "score": 0.9, "box": box})
    answer = {"model": "pets v1", "width": 192, "height": 96, "detections": many}
    page.route("**/detect", lambda route: route.fulfill(json=answer))
    drop(page, ("a.jpg", jpeg()))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        scroller, button = page.locator(".scroll"), page.locator(f"{ROWS} button").first
        right = scroller.bounding_box()["x"] + scroller.bounding_box()["width"]
        assert button.bounding_box()["x"] + button.bounding_box()["width"] <= right + 1
        assert scroller.evaluate("node => node.scrollWidth - node.clientWidth") <= 0
        assert page.locator(BOXES).count() == 40
        check_labels(page)
    page.locator(BOXES).nth(20).focus()
    assert page.locator("#boxes .selected").count() == 2  # The box, and its handles.
    check_labels(page)  # The label of what is selected has the first choice.


def test_every_button_shows_that_it_has_the_focus(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    seen = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        name, style = page.evaluate(
            "(node => [node.id || node.tagName, getComputedStyle(node.matches('#file') ? node.parentElement"
            " : node).outlineStyle])(document.activeElement)"
        )
        seen.add(name)
        if name not in ("BODY", "g"):  # A box has a white edge instead.
            assert style != "none", name
    assert {"file", "camera", "draw", "right", "least", "copy", "g", "SELECT"} <= seen


def test_two_labels_do_not_hide_each_other(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    draw_with_keys(page, 3)
    assert page.locator("#boxes .plate").count() == 4
    check_labels(page)
