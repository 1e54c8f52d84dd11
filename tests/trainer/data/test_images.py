import errno
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from trainer.base.errors import ResourceError
from trainer.data import decoding, images
from trainer.data.images import (
    DISPLAYED_SHARES,
    STORED_SHARES,
    UnreadableImage,
    find_size_problem,
    normalize,
    to_pixels,
)
from trainer.data.sources.source import parse_side


def picture(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """A dark image with a bright box at x 10 to 30, y 5 to 15."""
    image = Image.new("RGB", (width, height), (20, 30, 40))
    image.paste((250, 240, 230), (10, 5, 30, 15))
    return image.convert(mode, dither=Image.Dither.NONE)


BOX = [10.0, 5.0, 20.0, 10.0]


def encode(image: Image.Image, file_format: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def with_orientation(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, exif=exif, quality=95)


def decode(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def bright_extent(data: bytes) -> list[float]:
    """x, y, width and height of what is bright."""
    extent = Image.fromarray(np.asarray(decode(data).convert("L")) > 128).getbbox()
    assert extent is not None
    x0, y0, x1, y1 = extent
    return [float(x0), float(y0), float(x1 - x0), float(y1 - y0)]


def is_baseline(data: bytes) -> bool:
    return normalize(data, 1600, 95).jpeg == data


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {}),
        ("L", {}),
        ("RGB", {"subsampling": "4:4:4"}),
        ("RGB", {"subsampling": "4:2:2"}),
        ("RGB", {"optimize": True}),
        ("RGB", {"restart_marker_rows": 1}),
    ],
)
def test_a_baseline_jpeg_is_passed_on_byte_for_byte(mode, options):
    data = encode(picture(mode=mode), **options)
    normal = normalize(data, 1600, 95)
    assert normal.jpeg == data
    assert (normal.width, normal.height, normal.orientation) == (60, 40, 1)


@pytest.mark.parametrize(
    ("file_format", "mode", "options", "expected"),
    [
        ("PNG", "RGB", {}, "RGB"), ("PNG", "L", {}, "L"), ("PNG", "P", {}, "RGB"), ("PNG", "1", {}, "L"),
        ("PNG", "RGBA", {}, "RGB"), ("PNG", "LA", {}, "RGB"), ("PNG", "I;16", {}, "L"),
        ("BMP", "RGB", {}, "RGB"), ("WEBP", "RGB", {"lossless": True}, "RGB"), ("GIF", "P", {}, "RGB"),
        ("TIFF", "RGB", {}, "RGB"), ("TIFF", "CMYK", {}, "RGB"),
        ("JPEG", "CMYK", {}, "RGB"), ("JPEG", "RGB", {"progressive": True}, "RGB"),
        ("JPEG", "L", {"progressive": True}, "L"), ("HEIF", "RGB", {}, "RGB"), ("AVIF", "RGB", {}, "RGB"),
    ],
)  # fmt: skip
def test_other_images_become_baseline_jpeg(file_format, mode, options, expected):
    if mode == "I;16":
        image = Image.fromarray(np.asarray(picture(mode="L")).astype(np.uint16) * 257)
    else:
        image = picture(mode=mode)
    normal = normalize(encode(image, file_format, **options), 1600, 95)
    assert is_baseline(normal.jpeg)
    assert decode(normal.jpeg).mode == expected
    assert bright_extent(normal.jpeg) == BOX
    dark, bright = (decode(normal.jpeg).convert("L").getpixel(at) for at in ((50, 30), (20, 10)))
    assert dark < 60 and bright > 200


def test_what_is_transparent_becomes_white():
    image = picture(mode="RGBA")
    image.paste((0, 0, 0, 0), (40, 20, 60, 40))
    assert decode(normalize(encode(image, "PNG"), 1600, 95).jpeg).getpixel((50, 30)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_baked_in_and_boxes_as_displayed_stay(orientation):
    displayed = picture()
    # The stored pixels are those that the orientation turns into `displayed`.
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    stored = decode(with_orientation(displayed, inverse))
    stored = ImageOps.exif_transpose(stored)
    normal = normalize(with_orientation(stored, orientation), 1600, 95)
    assert (normal.width, normal.height, normal.orientation) == (60, 40, orientation)
    assert decode(normal.jpeg).getexif().get(0x0112, 1) == 1
    assert bright_extent(normal.jpeg) == BOX
    assert to_pixels(BOX, normal, 60, 40) == BOX
    assert to_pixels(BOX, normal, 0, 0) == BOX


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_in_stored_pixels_are_turned_along(orientation):
    normal = normalize(with_orientation(picture(), orientation), 1600, 95)
    assert (normal.width, normal.height) == (40, 60)
    assert to_pixels(BOX, normal, 60, 40) == bright_extent(normal.jpeg)
    assert not find_size_problem(normal, 60, 40, []) and not find_size_problem(normal, 40, 60, [])


def test_large_images_are_shrunk_and_boxes_with_them():
    normal = normalize(encode(picture(600, 400).resize((600, 400))), 150, 95)
    assert (normal.width, normal.height) == (150, 100)
    assert to_pixels([40.0, 20.0, 100.0, 60.0], normal, 600, 400) == [10.0, 5.0, 25.0, 15.0]


def test_an_image_resized_after_annotation_takes_its_boxes_along_in_its_proportions():
    normal = normalize(encode(picture()), 1600, 95)
    assert to_pixels([20.0, 10.0, 40.0, 20.0], normal, 120, 80) == BOX == to_pixels(BOX, normal, 77, 11)
    assert find_size_problem(normal, 120, 80, [])


@pytest.mark.parametrize("side", [1, -1])
def test_a_size_of_one_pixel_does_not_multiply_boxes(side):
    normal = normalize(encode(picture().resize((50, 50))), 1600, 95)
    assert to_pixels(BOX, normal, side, side) == BOX and find_size_problem(normal, side, side, [BOX])


@pytest.mark.parametrize(
    ("value", "side"),
    [(640, 640), (1, 1), (0, 0), (None, 0), ("640", 0), (-2, -1), (-3, -1), (2**40, -1), (0.5, -1)],
)
def test_no_annotated_size_is_that_of_shares(value, side):
    assert parse_side(value) == side and side not in (*STORED_SHARES, *DISPLAYED_SHARES)


def png_of_claimed_size(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", 1000) + b"IDAT"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html>not found</html>", "not an image"),
        (b"\xff\xd8\xff", "not an image"),
        (encode(picture())[:200], "not an image"),
        (encode(picture(300, 300))[:-400], "cut off"),
        (encode(picture(300, 300), progressive=True)[:-400], "cut off"),
        (encode(picture(300, 300), "PNG")[:-100], "cut off"),
        (png_of_claimed_size(50_000, 50_000), "pixels"),
        (png_of_claimed_size(15_000, 14_000), "pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encode(Image.new("F", (9, 9), 0.5), "TIFF"), "neither 8 nor 16 bits"),
    ],
)
def test_unreadable_images_say_why(data, reason):
    with pytest.raises(UnreadableImage, match=reason):
        normalize(data, 1600, 95)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_as_shares_of_the_stored_sides_are_turned_along(orientation):
    normal = normalize(with_orientation(picture(), orientation), 1600, 95)
    shares = [10 / 60, 5 / 40, 20 / 60, 10 / 40]
    assert to_pixels(shares, normal, *STORED_SHARES) == pytest.approx(bright_extent(normal.jpeg))
    assert not find_size_problem(normal, *STORED_SHARES, [])


def test_only_exif_and_xmp_are_stripped():
    plain = encode(picture(), quality=90, dpi=(72, 72))
    profile = b"ICC_PROFILE\0\x01\x01" + bytes(100)
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x/>"
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x01\0\0\0\0\0\0"

    def segment(marker: int, content: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    kept = segment(0xE2, profile)
    data = plain[:2] + segment(0xE1, exif) + kept + segment(0xE1, xmp) + plain[2:]
    assert normalize(data, 1600, 95).jpeg == plain[:2] + kept + plain[2:]
    assert decode(data).tobytes() == decode(plain).tobytes()


def test_every_cut_of_a_file_is_found():
    data = encode(picture(300, 300))
    thumbnail = b"\xff\xe1\0\x08ab\xff\xd9cd"
    cut = data[:2] + thumbnail + data[2:-20]
    for damaged in (cut, *(data[:length] for length in range(1, len(data) - 2, 197))):
        with pytest.raises(UnreadableImage):
            normalize(damaged, 1600, 95)
    assert normalize(data + bytes(10), 1600, 95).jpeg == data + bytes(10)


def test_damage_inside_is_found_only_where_all_is_decoded():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8))
    data = encode(noise)
    damaged = data[: len(data) // 2] + b"\xff\x00" * 200 + data[len(data) // 2 + 400 :]
    assert normalize(damaged, 1600, 95).jpeg == damaged
    with pytest.raises(UnreadableImage, match="damaged"):
        normalize(damaged, 1600, 95, decode=True)
    assert normalize(data, 1600, 95, decode=True).jpeg == data


def test_a_huge_jpeg_is_not_decoded_at_full_size(monkeypatch):
    sizes = []
    real = images._load
    monkeypatch.setattr(images, "_load", lambda image: (real(image), sizes.append(image.size)))
    normal = normalize(encode(picture(2400, 1600)), 300, 95)
    assert (normal.width, normal.height, normal.stored_width) == (300, 200, 2400)
    assert sizes == [(600, 400)]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError("out of memory error when reading image file"),  # As Pillow says it.
        ValueError("Insufficient memory (case 4)"),  # As libjpeg says it.
    ],
)
def test_want_of_memory_or_files_is_no_damage(error, monkeypatch):
    """Of a machine that lacks something every image would look damaged."""

    def fail(*_, **__):
        raise error

    data, plain = encode(picture(), "PNG"), encode(picture())
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "load", fail)
        patch.setattr("PIL.ImageFile.ImageFile.load", fail)
        for read in (lambda: normalize(data, 100, 90), lambda: images.read_upright(data)):
            with pytest.raises(ResourceError) as caught:
                read()
            assert "damaged" not in str(caught.value) and caught.value.fix
    if not isinstance(error, OSError):  # simplejpeg opens no files
        monkeypatch.setattr("simplejpeg.decode_jpeg", fail)
        for read in (lambda: normalize(plain, 100, 90, decode=True), lambda: decoding.decode(plain, 60, 40)):
            with pytest.raises(ResourceError):
                read()
