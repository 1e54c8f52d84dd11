"""Reads a JPEG's headers without decoding it. Markers: ITU-T T.81, table B.1."""

import struct
from dataclasses import dataclass

_START = b"\xff\xd8"
_END = b"\xff\xd9"
_TAIL = 4096
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_FRAMES = frozenset(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
_BASELINE, _TABLES_HUFFMAN, _TABLES_QUANTISATION, _SCAN, _APP1 = 0xC0, 0xC4, 0xDB, 0xDA, 0xE1
_SAMPLINGS = frozenset((0x11, 0x21, 0x22, 0x12, 0x41, 0x14))
"""Horizontal and vertical sampling of the brightness, four bits each, that every decoder knows."""


@dataclass(frozen=True)
class Header:
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


def parse(data: bytes) -> Header | None:
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
) -> Header | None:
    if frame is None or frame + 10 > scan:
        return None
    marker, _, bits, height, width, components = struct.unpack_from(">BHBHHB", data, frame + 1)
    sampling = data[frame + 11 : frame + 10 + 3 * components : 3]
    baseline = marker == _BASELINE and bits == 8 and len(sampling) == components
    return Header(width, height, baseline, tuple(sampling), tuple(app1), scan, frozenset(tables))


def is_whole(data: bytes, header: Header) -> bool:
    """Tell whether the end-of-image marker is present; no other bytes of a scan can look like it."""
    # Nearly always it is at the very end: look there first.
    return data.rfind(_END, max(header.scan, len(data) - _TAIL)) >= 0 or data.find(_END, header.scan) >= 0


def without_app1(data: bytes, header: Header) -> bytes:
    """Return a JPEG without its Exif and XMP blocks; all else stays byte for byte."""
    kept, after = [], 0
    for begin, end in header.app1:
        kept.append(data[after:begin])
        after = end
    return b"".join([*kept, data[after:]]) if kept else data
