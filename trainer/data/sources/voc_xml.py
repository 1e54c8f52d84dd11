"""Reads PASCAL VOC's XML: an image's size, name and objects.

VOC corners are pixels counted from 1, the last one included (VOC2012 development kit, section
on annotations), while the internal form measures from the image's top left corner. So

    x = xmin - 1, y = ymin - 1, width = xmax - xmin + 1, height = ymax - ymin + 1

and a box from 1 to the image's width covers all of it. COCO JSON that was made from VOC by plain
subtraction (x = xmin, width = xmax - xmin) is one pixel off that. Corners that coincide are a slip
of the annotator and no box of one pixel: such a box has no area here, as it has none there.
"""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from xml.parsers import expat

from trainer.data import problem_counts as reasons

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_COMMA = re.compile(r"-?\d+,\d+")


@dataclass
class VocAnnotation:
    """What one XML file says."""

    width: int
    height: int
    file_name: str
    objects: list[tuple[str, tuple[float, ...], int]]
    """(class name, bbox, iscrowd)"""
    fault: str = ""
    """Why nothing of it can be used."""
    bad_objects: list[tuple[str, str]] = field(default_factory=list)
    """(reason, what it is) of objects that have no box that can be used."""


def parse_xml(data: bytes) -> VocAnnotation:
    """Parse one annotation file; an unreadable one comes back with its fault."""
    try:
        _refuse_doctype(data)
        root = ET.fromstring(data)  # noqa: S314 (no DOCTYPE, so no entities)
    except (ET.ParseError, expat.ExpatError, ValueError, LookupError) as error:
        return VocAnnotation(0, 0, "", [], fault=f"its annotation is no XML that can be used: {error}")
    if root.tag != "annotation":
        of_cvat = "; it is CVAT's own: export as COCO or VOC there" if root.tag == "annotations" else ""
        fault = f"its annotation is no VOC XML: the root is <{root.tag}>{of_cvat}"
        return VocAnnotation(0, 0, "", [], fault=fault)
    width, height = (_number(root.findtext(f"size/{side}")) or 0 for side in ("width", "height"))
    # A backslash is Windows' way to part folders.
    name = (root.findtext("filename") or "").strip().replace("\\", "/")
    annotation = VocAnnotation(int(width), int(height), name, [])
    for number, item in enumerate(root.iterfind("object"), 1):
        label = (item.findtext("name") or "").strip()
        box = _box(item.find("bndbox"))
        if isinstance(box, str):
            annotation.bad_objects.append((box, f"object {number} ({label})"))
        else:
            annotation.objects.append((label, box, _flag(item.findtext("difficult"))))
    return annotation


def _refuse_doctype(data: bytes) -> None:
    """Raise ValueError at a DOCTYPE: its entities can read files and fill the memory."""

    def refuse(*_: object) -> None:
        raise ValueError("it has a DOCTYPE, which is refused")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)


def _box(corners: ET.Element | None) -> tuple[float, ...] | str:
    """Return [x, y, width, height], or the reason why there is none."""
    if corners is None:
        return reasons.BOX_ABSENT
    texts = [(corners.findtext(name) or "").strip() for name in _CORNERS]
    if not any(texts):
        return reasons.BOX_ABSENT
    xmin, ymin, xmax, ymax = map(_number, texts)
    if xmin is None or ymin is None or xmax is None or ymax is None:
        commas = any(_COMMA.fullmatch(text) for text in texts)
        return reasons.BOX_DECIMAL_COMMA if commas else reasons.BOX_NOT_FINITE
    wide = xmax - xmin + 1 if xmax > xmin else 0.0
    high = ymax - ymin + 1 if ymax > ymin else 0.0
    return xmin - 1, ymin - 1, wide, high


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < 1e9 else None


def _flag(text: str | None) -> int:
    return int((text or "").strip() == "1")
