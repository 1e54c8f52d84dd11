"""The page of the local server as a test uses it: images dropped on it, and what it shows."""

import base64
import io

from PIL import Image

BOXES = "#images .box"
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
    page.locator("#message", has_text="processed").wait_for()


def boxes(page):
    """The lines of the lists below the images."""
    return page.locator("#images li").all_inner_texts()
