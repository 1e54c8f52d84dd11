"""Boxes corrected on the local server's page, with a mouse and with keys, and exported as COCO."""

import json

import browser
import pytest
from served_page import BOXES, boxes, corrections, draw_with_keys, drop, jpeg

from trainer.data import merging, sources

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, browser.needed]


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
    page.fill("#least", "1")  # What is corrected is not hidden by the score.
    assert page.locator(BOXES).count() == 2
    page.fill("#least", "0.3")
    page.keyboard.press(".")
    page.get_by_role("button", name="Delete box 1").click()  # Nothing is on it: that is a correction too.
    download, archive, coco = corrections(page)
    assert [(item["file_name"], item["width"], item["height"]) for item in coco["images"]] == [
        ("a.jpg", 192, 96), ("a-2.jpg", 96, 96),
    ]  # fmt: skip
    assert archive.read("images/a.jpg") == first  # Its bytes: by them the set knows it again.
    assert coco["categories"] == [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog <b>"}]
    cat, dog = coco["annotations"]
    assert (cat["image_id"], cat["category_id"], dog["category_id"]) == (1, 7, 9)
    assert cat["bbox"] == pytest.approx([130, 10, 50, 50], abs=1)
    assert dog["bbox"] == pytest.approx([34, 22, 82, 58], abs=1)
    commands = page.inner_text("#commands")
    assert f"kubedet data merge SET {download.suggested_filename} -o more/pets" in commands
    path = tmp_path / "corrections.zip"
    download.save_as(path)
    listing = sources.parse(str(path)).listing()  # As a source it is read without being told what it is.
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


def test_the_tab_key_goes_from_box_to_box(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    draw_with_keys(page, 2)
    page.focus("#camera")
    while not page.evaluate("document.activeElement.matches('.box')"):
        page.keyboard.press("Tab")
    seen = []
    while page.evaluate("document.activeElement.matches('.box')"):
        seen.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert page.locator(f"{BOXES}[aria-pressed=true]").get_attribute("aria-label") == seen[-1]
        page.keyboard.press("Tab")
    assert len(seen) == 3 and seen[0] == "dog <b> 0.72, from 24, 12 to 96, 60"


def test_an_image_whose_boxes_are_right_is_exported_as_it_is(visit):
    page = visit()
    drop(page, ("a.jpg", jpeg()))
    page.get_by_role("button", name="All boxes are right").click()
    coco = corrections(page)[2]
    assert [item["bbox"] for item in coco["annotations"]] == [[24, 12, 72, 48]]
    page.get_by_role("button", name="All boxes are right").click()
    assert page.locator("#export").is_disabled()


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


def test_a_turned_image_and_classes_with_ids_of_text_are_exported_as_coco_has_them(visit, tmp_path):
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
