"""Converts images to upright baseline JPEGs, and their boxes accordingly.

The orientation is that of Exif 2.32, tag 0x0112.
"""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import AvifImagePlugin, BmpImagePlugin, GifImagePlugin, Image, PngImagePlugin, WebPImagePlugin  # noqa: F401
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile  # noqa: F401
from pillow_heif import register_heif_opener

from trainer.base.os_errors import raise_if_exhausted
from trainer.data import problem_counts as reasons

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".heic", ".heif", ".avif",
)  # fmt: skip

MAX_SIDE = 65_535  # pixels; the limit of JPEG
MAX_PIXELS = 178_956_970  # Larger images are refused before decoding: a small file can claim any size.

_SAMPLINGS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (1, 4))
"""Horizontal and vertical sampling factors of the luma that every decoder supports."""

_MAX_SCANS = 10
"""Scans that libjpeg writes in a progressive JPEG (jcparam.c, `jpeg_simple_progression`). With more scans,
fewer pixels are allowed, because decoding a scan of a few bytes visits all pixels."""
_START_OF_SCAN = b"\xff\xda"

# Importing a plugin registers it. Formats that run other programs (EPS) are excluded. JPEG includes MPO.
register_heif_opener()
_FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF"]

_PERCENTILES = (0.1, 99.9)
"""Percentiles of a 16-bit image that become black and white; a few broken pixels do not matter."""

STORED_SHARES = (-2, -2)  # annotated size of an image whose boxes are fractions of its stored sides

DISPLAYED_SHARES = (-3, -3)  # annotated size of an image whose boxes are fractions of its displayed sides

_ORIENTATION = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that makes an image of each Exif orientation upright."""


class UnreadableImage(Exception):
    """Raised for bytes that are not a usable image."""


class TooManyPixels(UnreadableImage):
    """Raised for an image with more pixels than the limit."""


@dataclass(frozen=True)
class NormalizedImage:
    """A baseline JPEG, grayscale or RGB, and its relation to the original image."""

    jpeg: bytes
    width: int  # of the JPEG, in pixels
    height: int
    stored_width: int  # of the original image in pixels, before its orientation was applied
    stored_height: int
    orientation: int  # Exif orientation that was applied, 1 to 8; 1 is upright

    @property
    def swaps_sides(self) -> bool:
        """Whether the orientation exchanges width and height."""
        return self.orientation >= 5


def normalize(data: bytes, max_side: int, quality: int, *, decode: bool = False) -> NormalizedImage:
    """Convert an image to baseline JPEG; a file that is one already only loses its Exif block.

    The longer side is reduced to `max_side`. `quality` is used for JPEGs that have to be encoded. `decode`
    decodes every image, which detects damage between the headers and the end.
    """
    image = _open(data)
    orientation, stored = _orientation(image), image.size
    jpeg = _to_baseline(data, image) if orientation == 1 and max(stored) <= max_side else None
    if jpeg is not None:
        if decode:
            try:
                simplejpeg.decode_jpeg(jpeg, fastdct=True, fastupsample=True)
            except (ValueError, MemoryError) as error:
                raise_if_exhausted(error)
                raise UnreadableImage(f"damaged: {error}") from error
        return NormalizedImage(jpeg, *stored, *stored, 1)
    scale = min(1.0, max_side / max(stored))
    size = (max(1, round(stored[0] * scale)), max(1, round(stored[1] * scale)))
    if scale < 1:
        # Decode a JPEG at 1/2, 1/4 or 1/8, but at least at twice the target size.
        image.draft(None, (2 * size[0], 2 * size[1]))
    _load(image)
    image = to_8_bit(image)
    if scale < 1:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if orientation != 1:
        image = image.transpose(_TRANSPOSES[orientation])
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return NormalizedImage(buffer.getvalue(), *image.size, *stored, orientation)


def _to_baseline(data: bytes, image: Image.Image) -> bytes | None:
    """Return a baseline JPEG without its Exif and XMP blocks; None for other or truncated files."""
    if not isinstance(image, JpegImageFile) or image.info.get("progressive"):
        return None
    samplings = [layer[1:3] for layer in image.layer]  # For gray, or for luma and two chroma components.
    if samplings[1:] not in ([], [(1, 1), (1, 1)]) or samplings[0] not in _SAMPLINGS:
        return None
    for name, content in image.applist:
        if name == "APP1":
            data = data.replace(b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content, b"", 1)
    return data if data.rfind(b"\xff\xd9") > data.find(_START_OF_SCAN) else None


def crop(image: NormalizedImage, windows: Sequence[tuple[int, int, int, int]], quality: int) -> list[bytes]:
    """Return a JPEG of each window (left, top, width, height); a single window is the whole image."""
    if len(windows) == 1:
        return [image.jpeg]
    opened, jpegs = _open(image.jpeg), []
    _load(opened)
    for left, top, width, height in windows:
        buffer = io.BytesIO()
        opened.crop((left, top, left + width, top + height)).save(buffer, "JPEG", quality=quality)
        jpegs.append(buffer.getvalue())
    return jpegs


def read_upright(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image as it is displayed: upright, 8 bits, RGB; raise TooManyPixels or UnreadableImage."""
    image = _open(data, max_pixels)
    orientation = _orientation(image)
    _load(image)
    image = to_8_bit(image).convert("RGB")
    if orientation != 1:
        image = image.transpose(_TRANSPOSES[orientation])
    return Image.fromarray(np.asarray(image))  # Drops the orientation of the file's metadata.


def read_header(data: bytes) -> NormalizedImage:
    """Read the stored and displayed size of an image from its header; `jpeg` is empty."""
    image = _open(data)
    orientation, stored = _orientation(image), image.size
    displayed = stored[::-1] if orientation >= 5 else stored
    return NormalizedImage(b"", *displayed, *stored, orientation)


def to_pixels(
    bbox: list[float], image: NormalizedImage, annotated_width: int, annotated_height: int
) -> list[float]:
    """Convert an annotated box [x, y, width, height] to pixels of the normalized image.

    Boxes belong to the displayed image, which labeling tools show. If the annotated size is that of the
    stored pixels, the boxes are rotated. If only its proportions match, the image was resized after it was
    annotated, and the boxes are scaled; sides below 2 pixels do not count as a size (see
    `sources.source.parse_side`). For STORED_SHARES and DISPLAYED_SHARES, boxes are fractions of the
    image's sides.
    """
    annotated = (annotated_width, annotated_height)
    stored = (image.stored_width, image.stored_height)
    displayed = stored[::-1] if image.swaps_sides else stored
    base = displayed
    if annotated in (STORED_SHARES, DISPLAYED_SHARES):
        sides = stored if annotated == STORED_SHARES else displayed
        bbox = [value * side for value, side in zip(bbox, 2 * sides, strict=True)]
    elif annotated not in (stored, displayed) and _is_proportional(annotated, displayed):
        base = annotated
    if annotated == STORED_SHARES or annotated == stored != displayed:
        bbox = _rotate_box(bbox, *stored, image.orientation)
    scale_x, scale_y = image.width / base[0], image.height / base[1]
    if scale_x == 1 and scale_y == 1:
        return bbox
    x, y, w, h = bbox
    return [round(value, 3) for value in (x * scale_x, y * scale_y, w * scale_x, h * scale_y)]


def _is_proportional(size: tuple[int, int], reference: tuple[int, int]) -> bool:
    """Return whether a size is known and has the proportions of the reference."""
    return min(size) > 1 and abs(size[0] * reference[1] / (size[1] * reference[0]) - 1) < 0.01


def find_size_problem(
    image: NormalizedImage, annotated_width: int, annotated_height: int, boxes: list[list[float]]
) -> str:
    """Return what is wrong with an annotated size, see `trainer.data.problem_counts`; "" if nothing.

    `boxes` are [x, y, width, height] in pixels of the normalized image.
    """
    annotated = (annotated_width, annotated_height)
    stored = (image.stored_width, image.stored_height)
    if 0 in annotated or annotated in (stored, STORED_SHARES, DISPLAYED_SHARES):
        return ""
    if annotated != stored[::-1]:
        displayed = stored[::-1] if image.swaps_sides else stored
        return reasons.IMAGE_RESIZED if _is_proportional(annotated, displayed) else reasons.SIZE_DIFFERS
    if image.swaps_sides:
        return ""
    return reasons.SIZE_EXCHANGED if are_inside(boxes, image.width, image.height) else reasons.IMAGE_ROTATED


def are_inside(boxes: list[list[float]], width: float, height: float) -> bool:
    """Return whether boxes [x, y, width, height] end within an image of this size plus a margin of 1 %."""
    right = max((box[0] + box[2] for box in boxes), default=0)
    below = max((box[1] + box[3] for box in boxes), default=0)
    return right <= 1.01 * width + 1 and below <= 1.01 * height + 1


def _open(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    if not data:
        raise UnreadableImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked below, and odd metadata
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise TooManyPixels(f"more than the limit of {min(max_pixels, MAX_PIXELS):,} pixels") from error
    except Exception as error:  # decoders raise nearly anything for hostile bytes
        raise_if_exhausted(error)
        raise UnreadableImage("not an image that can be read") from error
    pixels = image.width * image.height
    if max(image.size) > MAX_SIDE:
        raise TooManyPixels(f"{image.width}x{image.height}: a side has more than {MAX_SIDE:,} pixels")
    if pixels > max_pixels:
        raise TooManyPixels(
            f"{image.width}x{image.height} are {pixels:,} pixels, more than the limit of {max_pixels:,}"
        )
    scans = data.count(_START_OF_SCAN) if image.info.get("progressive") else 1
    if pixels * scans > _MAX_SCANS * max_pixels:
        raise TooManyPixels(
            f"{scans} scans of {image.width}x{image.height} pixels, too many for {max_pixels:,} pixels"
        )
    return image


def _load(image: Image.Image) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
    except Exception as error:
        raise_if_exhausted(error)
        raise UnreadableImage(f"damaged or cut off: {error}") from error


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception as error:  # an unreadable Exif block is ignored
        raise_if_exhausted(error)
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def to_8_bit(image: Image.Image) -> Image.Image:
    """Return the image as 8-bit grayscale or RGB; transparent parts become white.

    The range of values in 16-bit grayscale becomes 0 to 255, because cameras with 12 bits also write 16-bit
    files. For 16-bit colors Pillow reads the upper 8 bits.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        pixels = np.asarray(image)
        if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535:
            raise UnreadableImage("pixels have neither 8 nor 16 bits")
        low, high = np.percentile(pixels, _PERCENTILES)
        if low == high:
            low, high = pixels.min(), max(pixels.max(), pixels.min() + 1)
        scaled = np.clip((pixels.astype(np.float32) - low) * (255 / (high - low)), 0, 255)
        return Image.fromarray(np.rint(scaled).astype(np.uint8))
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        white = Image.new("RGBA", opaque.size, "white")
        return Image.alpha_composite(white, opaque).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def _rotate_box(bbox: list[float], width: int, height: int, orientation: int) -> list[float]:
    """Rotate a box of a stored image of this size by an Exif orientation."""
    if orientation == 1:
        return bbox
    x, y, w, h = bbox
    right, below = width - x - w, height - y - h
    turned = {
        2: [right, y, w, h],  # mirrored
        3: [right, below, w, h],  # upside down
        4: [x, below, w, h],  # mirrored upside down
        5: [y, x, h, w],  # transposed
        6: [below, x, h, w],  # displayed rotated clockwise
        7: [below, right, h, w],  # transposed over the other diagonal
        8: [y, right, h, w],  # displayed rotated counterclockwise
    }
    return turned.get(orientation, bbox)
