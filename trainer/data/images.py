"""Converts any image to an upright baseline JPEG, and its boxes with it.

JPEG headers are read without decoding (markers: ITU-T T.81, table B.1). Orientation: Exif 2.32, tag 0x0112.
"""

import io
import struct
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from pillow_heif import HeifImageFile, register_heif_opener

from trainer.base.os_errors import check_resources
from trainer.data import problem_counts as reasons

_START = b"\xff\xd8"
_END = b"\xff\xd9"
_TAIL = 4096
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_FRAMES = frozenset(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
_BASELINE, _TABLES_HUFFMAN, _TABLES_QUANTISATION, _SCAN, _APP1 = 0xC0, 0xC4, 0xDB, 0xDA, 0xE1
_SAMPLINGS = frozenset((0x11, 0x21, 0x22, 0x12, 0x41, 0x14))
"""Horizontal and vertical sampling of the brightness, four bits each, that every decoder knows."""


@dataclass(frozen=True)
class JpegHeader:
    """The headers before a JPEG's first scan."""

    width: int
    """In pixels; as stored, whatever its Exif block says."""
    height: int
    baseline: bool
    """Sequential, of 8 bits, Huffman coded (SOF0)."""
    sampling: tuple[int, ...]
    """Horizontal and vertical sampling of each component, four bits each."""
    app1: tuple[tuple[int, int], ...]
    """Begin and end of its Exif and XMP blocks."""
    scan: int
    """Where its first scan begins."""
    tables: frozenset[int]
    """Markers of the kinds of tables that it brings."""

    @property
    def plain(self) -> bool:
        """Whether every decoder supports it: baseline, grey or three components, with its own tables."""
        if not (self.baseline and self.width and self.height):
            return False
        if not {_TABLES_HUFFMAN, _TABLES_QUANTISATION} <= self.tables:
            return False
        if len(self.sampling) == 1:
            return True
        return (
            len(self.sampling) == 3 and self.sampling[0] in _SAMPLINGS and self.sampling[1:] == (0x11, 0x11)
        )


def parse_jpeg(data: bytes) -> JpegHeader | None:
    """Parse the headers; None where it is no JPEG or ends before its first scan."""
    if data[:2] != _START:
        return None
    at: int = 2
    frame: int | None = None
    app1: list[tuple[int, int]] = []
    tables: set[int] = set()
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        if marker == _SCAN:
            return _header(data, frame, app1, tables, at)
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            frame = at
        elif marker == _APP1:
            app1.append((at, end))
        elif marker in (_TABLES_HUFFMAN, _TABLES_QUANTISATION):
            tables.add(marker)
        at = end
    return None


def _header(
    data: bytes, frame: int | None, app1: list[tuple[int, int]], tables: set[int], scan: int
) -> JpegHeader | None:
    if frame is None or frame + 10 > scan:
        return None
    marker, _, bits, height, width, components = struct.unpack_from(">BHBHHB", data, frame + 1)
    sampling = data[frame + 11 : frame + 10 + 3 * components : 3]
    baseline = marker == _BASELINE and bits == 8 and len(sampling) == components
    return JpegHeader(width, height, baseline, tuple(sampling), tuple(app1), scan, frozenset(tables))


def is_whole(data: bytes, header: JpegHeader) -> bool:
    """Tell whether the end-of-image marker is present; no other bytes of a scan can look like it."""
    # Nearly always it is at the very end: look there first.
    return data.rfind(_END, max(header.scan, len(data) - _TAIL)) >= 0 or data.find(_END, header.scan) >= 0


def without_app1(data: bytes, header: JpegHeader) -> bytes:
    """Return a JPEG without its Exif and XMP blocks; all else stays byte for byte."""
    kept, after = [], 0
    for begin, end in header.app1:
        kept.append(data[after:begin])
        after = end
    return b"".join([*kept, data[after:]]) if kept else data


IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".heic", ".heif", ".avif",
)  # fmt: skip

MAX_PIXELS = 178_956_970
"""Larger images are refused before they are decoded, by Pillow too: a small file can claim any size."""

_SCANS = 10
"""Of a progressive JPEG, as libjpeg writes it (jcparam.c, `jpeg_simple_progression`). One with more must have
fewer pixels: each scan goes over all of them, and a few bytes are enough for a scan."""
_BEGIN_OF_SCAN = b"\xff\xda"

# Importing a plugin registers it; formats that run other programs (EPS) stay out. JPEG includes MPO.
register_heif_opener()
_PLUGINS = (
    JpegImageFile, PngImageFile, WebPImageFile, BmpImageFile, GifImageFile, TiffImageFile, AvifImageFile,
    HeifImageFile,
)  # fmt: skip
_FORMATS = [plugin.format for plugin in _PLUGINS]
_BEGINNINGS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
    b"MM\0+",
)
_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Of the files of HEIF (ISO/IEC 23008-12) that hold images: AVIF and HEIC."""

_BITS_PER_SAMPLE = 258
"""TIFF tag."""

_RANGE = (0.1, 99.9)
"""Percentiles of a 16-bit image that become black and white: a few broken pixels must not decide."""

SHARES = (1, 1)
"""Annotated size of an image whose boxes are shares of its sides as it is stored."""

SHARES_UPRIGHT = (-1, -1)
"""The same, of its sides as it is displayed, its orientation applied."""

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
"""Transposition that turns an image of each Exif orientation upright."""


class UnreadableImage(Exception):
    """The bytes are no usable image; the message says why."""


class TooManyPixels(UnreadableImage):
    """The image is larger than what is decoded."""


@dataclass(frozen=True)
class NormalImage:
    """A baseline JPEG, greyscale or RGB, and its relation to the original image."""

    jpeg: bytes
    width: int
    """Of the JPEG, in pixels."""
    height: int
    stored_width: int
    """Of the original image, in pixels, before its orientation was applied."""
    stored_height: int
    orientation: int
    """Exif orientation that was applied, 1 to 8; 1 is none."""
    deep: bool = False
    """Whether the original has 16 bits a channel, which were scaled to the range of its values."""

    @property
    def turned(self) -> bool:
        """Tell whether the orientation exchanges width and height."""
        return self.orientation >= 5


def normalize(
    data: bytes, max_side: int, quality: int, orientation: int = 0, *, decode: bool = False
) -> NormalImage:
    """Return an image as baseline JPEG; an image that is one already only loses its Exif block.

    The block goes because some decoders turn the image by it and others do not. Where an image can
    stay as it is, its headers and its end are looked at, and no pixel; all others are decoded.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, HEIC or AVIF file.
        max_side: images with a longer side are shrunk to it, in pixels.
        quality: of JPEGs that have to be written, 1 to 100.
        orientation: Exif orientation to apply, 1 to 8, whatever the file says; 0 takes the file's.
        decode: decode those that can stay as they are too, for that alone finds damage inside.

    Raises:
        UnreadableImage: it is no image, cut off, or too large to decode.
    """
    header = parse_jpeg(data)
    if header is None or not header.plain or max(header.width, header.height) > max_side:
        return _written_anew(data, max_side, quality, orientation)
    turned = orientation or (_orientation(_open(data)) if header.app1 else 1)
    if turned != 1 or not is_whole(data, header):
        return _written_anew(data, max_side, quality, orientation)
    if decode:
        _decode(data)
    size = (header.width, header.height)
    return NormalImage(without_app1(data, header), *size, *size, 1)


def _decode(data: bytes) -> None:
    """Refuse a JPEG that the decoder of the training would refuse."""
    try:
        simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True)
    except (ValueError, MemoryError) as error:
        check_resources(error)
        raise UnreadableImage(f"damaged: {error}") from error


def _written_anew(data: bytes, max_side: int, quality: int, orientation: int) -> NormalImage:
    image = _open(data)
    stored = image.size
    orientation = orientation or _orientation(image)
    scale = min(1.0, max_side / max(stored))
    size = (max(1, round(stored[0] * scale)), max(1, round(stored[1] * scale)))
    if scale < 1:
        # A JPEG is decoded at a half, quarter or eighth, but at no less than twice the target size.
        image.draft(None, (2 * size[0], 2 * size[1]))
    _load(image)
    deep = _is_deep(image, data)
    image = plain(image, data)
    if scale < 1:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if orientation != 1:
        image = image.transpose(_TRANSPOSES[orientation])
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return NormalImage(buffer.getvalue(), *image.size, *stored, orientation, deep)


def read_upright(data: bytes, most_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image as people see it, and as `normalize` makes it for the shards: upright, 8 bits, RGB.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, HEIC or AVIF file.
        most_pixels: images with more are refused by their header, up to MAX_PIXELS.

    Raises:
        TooManyPixels: it has more.
        UnreadableImage: it is no image, or cut off.
    """
    image = _open(data, most_pixels)
    orientation = _orientation(image)
    _load(image)
    image = plain(image, data).convert("RGB")
    if orientation != 1:
        image = image.transpose(_TRANSPOSES[orientation])
    return Image.fromarray(np.asarray(image))  # Drops the orientation of the file's metadata.


def measure(data: bytes, orientation: int = 0) -> NormalImage:
    """Return the sizes of an image as it is stored and displayed, from its header, without a JPEG.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, HEIC or AVIF file.
        orientation: as in `normalize`.

    Raises:
        UnreadableImage: it is no image, or too large to decode.
    """
    image = _open(data)
    orientation = orientation or _orientation(image)
    stored = image.size
    displayed = stored[::-1] if orientation >= 5 else stored
    return NormalImage(b"", *displayed, *stored, orientation, _is_deep(image, data))


def check(data: bytes) -> None:
    """Refuse bytes that are no image, or cannot be decoded.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, HEIC or AVIF file; a JPEG is decoded at an eighth
            of its size.

    Raises:
        UnreadableImage: saying why.
    """
    image = _open(data)
    image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
    _load(image)


def begins_as_image(data: bytes) -> bool:
    """Tell whether bytes begin as a file of one of the formats does that images are read from."""
    webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return data.startswith(_BEGINNINGS) or webp or (data[4:8] == b"ftyp" and data[8:12] in _BRANDS)


def place_box(
    bbox: list[float], image: NormalImage, annotated_width: int, annotated_height: int
) -> list[float]:
    """Return a box in pixels of the normal image.

    Boxes belong to the image as it is displayed, its orientation applied, which is what labelling
    tools show. But if the annotated size is that of the stored pixels and not of the displayed
    ones, they are in stored pixels and are turned along. If the annotated size is neither, but has
    the same proportions, the image was resized after it was annotated, and the boxes follow. An
    annotated size of SHARES or SHARES_UPRIGHT says that boxes are shares of the image's sides.

    Args:
        bbox: [x, y, width, height] as annotated.
        image: what `normalize` returned.
        annotated_width: as the source says, in pixels; 0 if it does not.
        annotated_height: as the source says, in pixels; 0 if it does not.
    """
    annotated = (annotated_width, annotated_height)
    stored = (image.stored_width, image.stored_height)
    displayed = stored[::-1] if image.turned else stored
    base = displayed
    if annotated == SHARES:
        x, y, w, h = bbox
        bbox = [x * stored[0], y * stored[1], w * stored[0], h * stored[1]]
        bbox = _turn(bbox, *stored, image.orientation)
    elif annotated == SHARES_UPRIGHT:
        x, y, w, h = bbox
        bbox = [x * displayed[0], y * displayed[1], w * displayed[0], h * displayed[1]]
    elif annotated == stored and annotated != displayed:
        bbox = _turn(bbox, *stored, image.orientation)
    elif annotated != displayed and _same_proportions(annotated, displayed):
        base = annotated
    scale_x, scale_y = image.width / base[0], image.height / base[1]
    if scale_x == 1 and scale_y == 1:
        return bbox
    x, y, w, h = bbox
    return [round(value, 3) for value in (x * scale_x, y * scale_y, w * scale_x, h * scale_y)]


def size_agrees(image: NormalImage, annotated_width: int, annotated_height: int) -> bool:
    """Tell whether the annotated size is absent or that of the image, turned or not."""
    stored = (image.stored_width, image.stored_height)
    annotated = (annotated_width, annotated_height)
    has_size = annotated not in (SHARES, SHARES_UPRIGHT) and 0 not in annotated
    return not has_size or annotated == stored or (image.turned and annotated == stored[::-1])


def size_fault(
    image: NormalImage, annotated_width: int, annotated_height: int, boxes: list[list[float]]
) -> str:
    """Return the problem of an annotated size, one of `trainer.data.problem_counts`; "" if there is none.

    Args:
        image: what `normalize` or `measure` returned.
        annotated_width: as the source says.
        annotated_height: as the source says.
        boxes: [x, y, width, height] of each, in pixels of the normal image.
    """
    if size_agrees(image, annotated_width, annotated_height):
        return ""
    if (annotated_width, annotated_height) != (image.stored_height, image.stored_width):
        return reasons.SIZE_DIFFERS
    right = max((box[0] + box[2] for box in boxes), default=0)
    below = max((box[1] + box[3] for box in boxes), default=0)
    leaves = right > 1.01 * image.width + 1 or below > 1.01 * image.height + 1
    return reasons.IMAGE_ROTATED if leaves else reasons.SIZE_EXCHANGED


def _open(data: bytes, most_pixels: int = MAX_PIXELS) -> Image.Image:
    if not data:
        raise UnreadableImage("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are checked below, and of odd metadata
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise TooManyPixels(f"more than the limit of {min(most_pixels, MAX_PIXELS):,} pixels") from error
    except Exception as error:  # decoders of hostile bytes raise nearly anything
        check_resources(error)
        raise UnreadableImage("not an image that can be read") from error
    pixels = image.width * image.height
    if pixels > most_pixels:
        raise TooManyPixels(
            f"{image.width}x{image.height} are {pixels:,} pixels, more than the limit of {most_pixels:,}"
        )
    scans = data.count(_BEGIN_OF_SCAN) if image.info.get("progressive") else 1
    if pixels * scans > _SCANS * most_pixels:
        raise TooManyPixels(
            f"{scans} scans of {image.width}x{image.height} pixels, too many for {most_pixels:,} pixels"
        )
    return image


def _load(image: Image.Image) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
    except Exception as error:
        check_resources(error)
        raise UnreadableImage(f"damaged or cut off: {error}") from error


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception as error:  # an Exif block that cannot be read says nothing
        check_resources(error)
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def plain(image: Image.Image, data: bytes = b"") -> Image.Image:
    """Return the image as 8-bit greyscale or RGB; transparent parts become white.

    The values of 16-bit images are scaled so that the range that an image uses becomes 0 to 255: cameras with
    10, 12 or 14 bits write 16-bit files too.

    Args:
        image: as Pillow opened it.
        data: the file, of which 16-bit colours are read; Pillow has 8 bits of them.

    Raises:
        UnreadableImage: its pixels have a depth without an agreed white.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _from_deep(np.asarray(image))
    if _is_deep(image, data):
        return _from_deep_colors(image, data)
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        white = Image.new("RGBA", opaque.size, "white")
        return Image.alpha_composite(white, opaque).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def _is_deep(image: Image.Image, data: bytes) -> bool:
    """Whether a file has 16 bits a channel, by its header."""
    if image.format == "PNG":
        return data[24:25] == b"\x10"
    bits = image.tag_v2.get(_BITS_PER_SAMPLE, (8,)) if isinstance(image, TiffImageFile) else (8,)
    return max(bits) == 16


def _from_deep_colors(image: Image.Image, data: bytes) -> Image.Image:
    """Return colours, or greyscale with transparency, of 16 bits as 8 bits."""
    channels = _channels_of_png(data) if image.format == "PNG" else None
    if channels is None:
        upper_bits = image.convert("RGB")
        if np.asarray(upper_bits).max() < 128:
            raise UnreadableImage(
                "its colours have 16 bits, and do not use the upper ones: save it with 8 bits"
            )
        return upper_bits
    transparent = len(channels) % 2 == 0
    colors = _from_deep(channels[: len(channels) - transparent].transpose(1, 2, 0))
    if not transparent:
        return colors
    alpha = Image.fromarray((channels[-1] * (255.0 / max(1, channels[-1].max()))).astype(np.uint8))
    return Image.composite(colors, Image.new("RGB", colors.size, "white"), alpha)


def _channels_of_png(data: bytes) -> np.ndarray | None:
    """Return the channels of a PNG of 16 bits, uint16 [C, H, W]; None without a decoder for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import torch
            from torchvision.io import decode_png
        except ImportError:
            return None
        try:
            channels: np.ndarray = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy()
        except RuntimeError as error:
            check_resources(error)
            raise UnreadableImage(f"damaged or cut off: {error}") from error
    return channels


def _from_deep(pixels: np.ndarray) -> Image.Image:
    """Scale values of 16 bits, [H, W] or [H, W, C], to 8 bits; other depths have no agreed white."""
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535:
        raise UnreadableImage("pixels are neither of 8 nor of 16 bits")
    low, high = np.percentile(pixels, _RANGE)
    if low == high:
        low, high = pixels.min(), max(pixels.max(), pixels.min() + 1)
    scaled = np.clip((pixels.astype(np.float32) - low) * (255 / (high - low)), 0, 255)
    grey_or_rgb = np.rint(scaled).astype(np.uint8)
    if grey_or_rgb.ndim == 3 and grey_or_rgb.shape[2] == 1:
        grey_or_rgb = np.repeat(grey_or_rgb, 3, axis=2)
    return Image.fromarray(grey_or_rgb)


def _same_proportions(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return 0 not in a and abs(a[0] * b[1] / (a[1] * b[0]) - 1) < 0.01


def _turn(bbox: list[float], width: int, height: int, orientation: int) -> list[float]:
    """Turn a box of a stored image of that size the way `orientation` turns the image."""
    if orientation == 1:
        return bbox
    x, y, w, h = bbox
    right, below = width - x - w, height - y - h
    turned = {
        2: [right, y, w, h],  # mirrored
        3: [right, below, w, h],  # upside down
        4: [x, below, w, h],  # mirrored upside down
        5: [y, x, h, w],  # transposed
        6: [below, x, h, w],  # turned clockwise to be shown
        7: [below, right, h, w],  # transposed over the other diagonal
        8: [y, right, h, w],  # turned counter-clockwise to be shown
    }
    return turned.get(orientation, bbox)
