"""The page of the local server as a test uses it: images dropped on it, what it shows, what it gives."""

import base64
import io
import json
import zipfile

from PIL import Image

BOXES = "#boxes .box[tabindex]"
ROWS = "#found tbody tr"
DROP = """files => {
  const carried = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0));
    carried.items.add(new File([bytes], name, {type: "image/jpeg"}));
  }
  document.dispatchEvent(new DragEvent("drop", {dataTransfer: carried, bubbles: true, cancelable: true}));
}"""


def jpeg(size=(192, 96), color="white", turned=False):
    buffer, image = io.BytesIO(), Image.new("RGB", size, color)
    exif = image.getexif()
    if turned:
        exif[0x0112] = 6
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def drop(page, *files):
    page.evaluate(DROP, [(name, base64.b64encode(data).decode()) for name, data in files])
    page.locator("#message", has_text="looked at").wait_for()


def boxes(page):
    """Names and corners of the boxes of the table."""
    return [
        (line.locator("select option:checked").inner_text(), line.locator("td").nth(2).inner_text())
        for line in page.locator(ROWS).all()
    ]


def draw_with_keys(page, count):
    """Draw boxes without a mouse: each where the page puts one."""
    for _ in range(count):
        page.get_by_role("button", name="Draw a box").focus()
        page.keyboard.press("Enter")


def corrections(page):
    with page.expect_download() as download:
        page.click("#export")
    archive = zipfile.ZipFile(download.value.path())
    assert archive.testzip() is None
    return download.value, archive, json.loads(archive.read("annotations/instances_train.json"))
