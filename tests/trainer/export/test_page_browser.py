"""The local server's page in a real browser: images, detections, the camera, as a person uses them."""

import json

import browser
import pytest
from served_page import BOXES, ROWS, boxes, drop, jpeg

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, browser.needed]
REFUSED = (
    "(() => { navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', '%s') } })()"
)


def test_detections_of_a_dropped_image(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    # The class is called `dog <b>`: it is shown as text.
    assert boxes(page) == [("dog <b>", "24, 12, 96, 60")]
    assert page.locator(BOXES).get_attribute("aria-label") == "dog <b> 0.72, from 24, 12 to 96, 60"
    assert page.inner_text("#count") == "1 found, 0 below the least score"


def test_an_image_that_must_be_turned_is_shown_as_people_see_it(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg(turned=True)))
    assert page.get_attribute("#boxes", "viewBox") == "0 0 96 192"
    assert page.evaluate("[picture.naturalWidth, picture.naturalHeight]") == [96, 192]
    frames = [page.locator(what).bounding_box() for what in ("#picture", "#boxes")]
    assert [round(value) for value in frames[0].values()] == [round(value) for value in frames[1].values()]


def test_the_least_score_acts_without_a_request(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    before = len(visit.requests)
    for least, shown in (("0.9", 0), ("0.2", 1), ("0.73", 0), ("0.72", 1)):
        page.fill("#least", least)
        assert page.locator(BOXES).count() == page.locator(ROWS).count() == shown
    assert len(visit.requests) == before


def test_a_class_can_be_hidden(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    page.get_by_label("dog <b>", exact=True).uncheck()
    assert page.locator(BOXES).count() == 0
    page.get_by_label("dog <b>", exact=True).check()
    assert page.locator(BOXES).count() == 1


def test_several_images_of_which_one_is_none(visit):
    page = visit(allowed="status of 400")
    drop(page, ("a.jpg", jpeg()), ("junk.jpg", b"junk"), ("dark.jpg", jpeg(colour="black")))
    notes = page.locator("#images li span:last-child").all_inner_texts()
    assert notes == ["1 found", "did not work", "0 found"]
    assert "looked at 2 of 3 images; junk.jpg: what was sent: not an image" in page.inner_text("#message")
    page.keyboard.press(".")
    assert page.inner_text("#name") == "junk.jpg" and "did not work" in page.inner_text("#count")
    page.keyboard.press(".")
    assert page.inner_text("#name") == "dark.jpg"
    page.get_by_role("button", name="Next image").click()
    assert page.inner_text("#name") == "a.jpg"


def test_an_image_can_be_taken_away(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()), ("b.jpg", jpeg(size=(96, 96))), ("c.jpg", jpeg()))
    page.keyboard.press(".")
    page.get_by_role("button", name="All boxes are right").click()
    page.get_by_role("button", name="Take the image away").click()
    assert page.locator("#images li span:nth-of-type(1)").all_inner_texts() == ["a.jpg", "c.jpg"]
    assert page.inner_text("#name") == "c.jpg" and page.locator("#export").is_disabled()
    for _ in range(2):
        page.get_by_role("button", name="Take the image away").click()
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
        "pets v1", "a.jpg", 192, 0.3,
    )  # fmt: skip
    assert copied["detections"][0]["box"] == [24, 12, 96, 60] and not copied["corrected"]


def test_what_cannot_be_copied_is_there_to_be_marked(visit):
    page = visit()
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    drop(page, ("a.jpg", jpeg()))
    page.get_by_role("button", name="Copy as JSON").click()
    page.locator("#json").wait_for()
    assert json.loads(page.input_value("#json"))["detections"][0]["name"] == "dog <b>"


def test_the_camera(visit):
    page = visit()
    page.get_by_role("button", name="Use the camera").click()
    page.locator("#pace", has_text="s a picture").wait_for()
    page.get_by_role("button", name="Keep this picture").click()
    page.locator("#message", has_text="looked at 1 of 1 image").wait_for()
    assert page.inner_text("#name").startswith("camera-")
    page.get_by_role("button", name="Stop the camera").click()
    assert page.locator("#live").is_hidden() and page.evaluate("video.srcObject") is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("Object.defineProperty(navigator, 'mediaDevices', {value: undefined});"
         "Object.defineProperty(window, 'isSecureContext', {value: false})", "to pages of https"),
        ("Object.defineProperty(navigator, 'mediaDevices', {value: undefined})", "gives pages no camera"),
        (REFUSED % "NotAllowedError", "The camera was refused"),
        (REFUSED % "NotFoundError", "has no camera"),
    ],
)  # fmt: skip
def test_where_there_is_no_camera_a_sentence_says_why(visit, change, sentence):
    page = visit()
    page.evaluate(change)
    page.get_by_role("button", name="Use the camera").click()
    page.locator("#message.wrong", has_text=sentence).wait_for()
    assert page.locator("#live").is_hidden()


def test_a_touch_chooses_a_box_and_draws_one(visit):
    page = visit(has_touch=True, is_mobile=True)
    drop(page, ("a.jpg", jpeg()))
    frame = page.locator("#boxes").bounding_box()
    scale = frame["width"] / 192
    page.touchscreen.tap(frame["x"] + 60 * scale, frame["y"] + 40 * scale)
    assert page.locator(f"{BOXES}.selected").count() == 1
    page.get_by_role("button", name="Delete the box").tap()
    assert page.locator(BOXES).count() == 0
