"""The page of the local server in a browser: images, corrections, the camera, on a desktop and a phone."""

import json

import browser
import pytest
from served_page import BOXES, ROWS, boxes, corrections, draw_with_keys, drop, jpeg

from trainer.data import merging, sources

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, browser.needed, pytest.mark.extra]
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
         "Object.defineProperty(window, 'isSecureContext', {value: false})", "only for pages from https"),
        (REFUSED % "NotAllowedError", "The camera was refused"),
    ],
)  # fmt: skip
def test_without_a_camera_the_page_says_why(visit, change, sentence):
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


def test_boxes_are_corrected_with_a_mouse_and_exported_as_coco(visit, tmp_path):
    page = visit()
    first = jpeg()
    drop(page, ("a.jpg", first), ("a.jpg", jpeg(size=(96, 96))), ("c.jpg", jpeg()))
    assert page.locator("#export").is_disabled()
    frame = page.locator("#boxes").bounding_box()
    scale = frame["width"] / 192

    def drag(start, end):
        page.mouse.move(frame["x"] + start[0] * scale, frame["y"] + start[1] * scale)
        page.mouse.down()
        page.mouse.move(frame["x"] + end[0] * scale, frame["y"] + end[1] * scale, steps=3)
        page.mouse.up()

    drag((60, 40), (70, 50))  # Moves it by (10, 10).
    assert boxes(page) == [("dog <b>", "34, 22, 106, 70")]
    drag((106, 70), (116, 80))  # Pulls at its corner.
    assert boxes(page) == [("dog <b>", "34, 22, 116, 80")]
    page.get_by_role("button", name="Draw a box").click()
    drag((130, 10), (180, 60))
    page.get_by_label("Class of box 1").select_option("cat")
    assert boxes(page) == [("cat", "130, 10, 180, 60"), ("dog <b>", "34, 22, 116, 80")]
    page.fill("#least", "1")  # The least score does not hide corrected boxes.
    assert page.locator(BOXES).count() == 2
    page.fill("#least", "0.3")
    page.keyboard.press(".")
    page.get_by_role("button", name="Delete box 1").click()  # No box is a correction too.
    download, archive, coco = corrections(page)
    assert [(item["file_name"], item["width"], item["height"]) for item in coco["images"]] == [
        ("a.jpg", 192, 96), ("a-2.jpg", 96, 96),
    ]  # fmt: skip
    assert archive.read("images/a.jpg") == first  # Unchanged bytes: `data merge` matches images by them.
    assert coco["categories"] == [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog <b>"}]
    cat, dog = coco["annotations"]
    assert (cat["image_id"], cat["category_id"], dog["category_id"]) == (1, 7, 9)
    assert cat["bbox"] == pytest.approx([130, 10, 50, 50], abs=1)
    assert dog["bbox"] == pytest.approx([34, 22, 82, 58], abs=1)
    commands = page.inner_text("#commands")
    assert f"kubedet data merge SET {download.suggested_filename} -o more/pets" in commands
    path = tmp_path / "corrections.zip"
    download.save_as(path)
    listing = sources.parse(str(path)).listing()
    rows = [row for batch in listing.splits["train"].batches() for row in batch.to_pylist()]
    assert [(row["file_name"], len(row["boxes"])) for row in rows] == [("a.jpg", 2), ("a-2.jpg", 0)]


def test_boxes_are_corrected_with_keys_alone(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    page.focus("#after") if page.is_enabled("#after") else page.focus("#camera")
    while not page.evaluate("document.activeElement.matches('.box')"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Alt+ArrowLeft")
    assert boxes(page) == [("dog <b>", "25, 22, 96, 70")]
    draw_with_keys(page, 1)
    assert boxes(page)[0] == ("dog <b>", "64, 32, 128, 64")
    page.keyboard.press("Delete")
    assert boxes(page) == [("dog <b>", "25, 22, 96, 70")]
    page.get_by_role("button", name="Back to the model's").click()
    assert boxes(page) == [("dog <b>", "24, 12, 96, 60")] and page.locator("#export").is_disabled()


def test_boxes_of_different_classes_in_the_same_place_are_kept_only_on_request(visit):
    page = visit()
    found = [
        {"label": label, "name": name, "score": score, "box": [24 + label, 12, 96, 60]}
        for label, name, score in ((0, "cat", 0.8), (1, "dog <b>", 0.7))
    ]
    answer = {"model": "pets v1", "width": 192, "height": 96, "detections": found}
    page.route("**/detect", lambda route: route.fulfill(json=answer))
    drop(page, ("a.jpg", jpeg()))
    asked = []

    def answer_with(kept):
        page.once("dialog", lambda it: (asked.append(it.message), it.accept() if kept else it.dismiss()))

    right = page.get_by_role("button", name="All boxes are right")
    answer_with(False)
    right.click()
    assert "cat 0.80, dog <b> 0.70" in asked[0] and page.locator("#export").is_disabled()
    page.get_by_label("Class of box 1").select_option("dog <b>")
    assert page.locator("#export").is_enabled()  # One class in this place: nothing to ask.
    page.get_by_label("Class of box 1").select_option("cat")
    answer_with(False)
    page.click("#export")
    assert len(asked) == 2 and page.locator("#message.wrong").is_visible()
    answer_with(True)
    assert len(corrections(page)[2]["annotations"]) == 2
    page.get_by_label("Class of box 2").select_option("cat")
    assert len(corrections(page)[2]["annotations"]) == 2 and len(asked) == 3


def test_corrections_of_a_rotated_image_and_of_classes_with_text_ids_can_be_merged(visit, tmp_path):
    page = visit()
    model = json.loads(page.evaluate("fetch('model.json').then(answer => answer.text())"))
    model["classes"] = [{**item, "original_id": f"/m/{item['id']}"} for item in model["classes"]]
    page.route("**/model.json", lambda route: route.fulfill(json=model))
    page.reload()
    page.get_by_role("heading", name="Try pets").wait_for()
    drop(page, ("turned.jpg", jpeg(turned=True)))
    page.get_by_role("button", name="All boxes are right").click()
    download, _, coco = corrections(page)
    assert [(item["width"], item["height"]) for item in coco["images"]] == [(96, 192)]
    assert coco["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog <b>"}]
    path = tmp_path / "corrections.zip"
    download.save_as(path)
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "images" / "a.jpg").write_bytes(jpeg(turned=True))
    (tmp_path / "set" / "labels").mkdir()
    (tmp_path / "set" / "labels" / "a.txt").write_text("")
    (tmp_path / "set" / "data.yaml").write_text("names: [cat, dog <b>]\ntrain: images\n")
    merged = merging.merge(f"yolo:{tmp_path / 'set'}", [str(path)], str(tmp_path / "more"))
    assert merged.corrected == {"train": 1} and not merged.added
    whole = json.loads((tmp_path / "more/annotations/instances_train.json").read_text())
    assert [(item["width"], item["height"]) for item in whole["images"]] == [(96, 192)]
    assert whole["annotations"][0]["bbox"] == [24, 12, 72, 48]


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
            page.get_by_role("button", name="All boxes are right").click()
            corrections(page)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (state, width)
            assert page.evaluate(CONTRAST) == [], (state, width)
            assert page.evaluate(UNNAMED) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)")
