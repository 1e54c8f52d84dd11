"""Whatever bytes are called an image, they are refused for a reason or read."""

import io

import numpy as np
import pytest
from hostile import damaged, examples, tried
from hypothesis import given
from PIL import Image

from trainer.data import images
from trainer.export.predict import decode_image

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
MOST_PIXELS = 50_000_000
"""What `predict` and `serve` decode, unless they are told otherwise."""


def whole(form: str) -> bytes:
    """A picture in some format, with an orientation where it can have one."""
    pixels = np.arange(40 * 30 * 3, dtype=np.uint8).reshape(30, 40, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, exif=exif)
    return buffer.getvalue()


def read_all(data: bytes) -> None:
    """Read bytes in all ways in which images are read; what cannot be one has a reason each time."""
    for read in (
        lambda: images.read_upright(data, MOST_PIXELS),
        lambda: images.read_header(data),
        lambda: images.normalize(data, 64, 90, decode=True),
    ):
        try:
            read()
        except images.UnreadableImage as reason:
            assert str(reason)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_images(tmp_path, form):
    data = whole(form)
    read_all(data)
    path = tmp_path / "image"

    @examples(30)
    @given(damaged(data))
    def read(content):
        path.write_bytes(content)
        tried(lambda: read_all(content))
        tried(lambda: decode_image(path.read_bytes(), "the image", MOST_PIXELS))

    read()
