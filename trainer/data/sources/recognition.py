"""Finds out what kind of data set a folder or file is."""

import re
from collections.abc import Callable, Iterator
from itertools import islice

from trainer import storage
from trainer.base.errors import DataError
from trainer.data.sources.coco import CocoSource, annotation_files
from trainer.data.sources.source import Source
from trainer.data.sources.voc import VocSource
from trainer.data.sources.yolo import YoloSource
from trainer.data.sources.yolo_set import YAML, file_of

_PEEK = 1024 * 1024
_PROBES = 3
_FOREIGN = (
    ("CVAT", rb"<annotations[\s>]", "in CVAT, export the task as COCO 1.0, PASCAL VOC 1.1 or YOLO 1.1"),
    ("LabelMe", rb"<sourceImage", "export as PASCAL VOC or COCO; Datumaro converts `label_me` to `coco`"),
    ("labelme", rb'"shapes"\s*:', "convert them with labelme2coco, which writes COCO JSON"),
    ("VIA", rb'"_via_img_metadata"|"file_attributes"\s*:',
     "in VIA, choose Annotation > Export Annotations (COCO format)"),
    ("Label Studio", rb'"from_name"\s*:', "in Label Studio, export as COCO or YOLO"),
)  # fmt: skip
"""Tools, what their files contain, and what to do."""

_COCO_KEYS = (b'"images"', b'"annotations"')  # Label Studio's notes.json has categories.

KINDS: dict[str, Callable[[str, str], Source]] = {
    "coco": lambda location, confined: CocoSource(location, confined=confined),
    "voc": lambda location, confined: VocSource(location),
    "yolo": lambda location, confined: YoloSource(location, confined=confined),
}
"""Sources by the word that names their kind: made of a location and a folder that no name may leave."""


def kind_of(uri: str) -> str:
    """Return the kind of a folder or file, one of KINDS; "" where it is none.

    Raises:
        DataError: a folder holds several sets.
        StorageError: it cannot be read.
    """
    if uri.lower().endswith((".json", *YAML)):
        return "coco" if uri.lower().endswith(".json") else "yolo"
    return "" if storage.scheme(uri) in storage.WEB else next(_kinds(uri), "")


def refuse_foreign(uri: str, kind: str) -> None:
    """Refuse annotations that a tool wrote in a form of its own, naming the tool and what to export.

    Args:
        uri: of a folder or file.
        kind: what it seems to be, one of KINDS; "" is unknown.

    Raises:
        DataError: they are such annotations; StorageError: they cannot be read.
    """
    # A place on a server whose kind the user names is not looked at before it is listed.
    if kind == "yolo" or storage.scheme(uri) in storage.WEB or (kind and not storage.is_local(uri)):
        return
    files = [uri]
    if not uri.lower().endswith((".json", ".xml")):
        files = annotation_files(uri)[:1] if kind == "coco" else []
        suffixes = (".xml",) if kind else (".json", ".xml")
        names = (name for name, _ in storage.scan(uri) if name.lower().endswith(suffixes))
        files += [storage.join(uri, name) for name in islice(names, _PROBES)]
    for file in files:
        head = storage.read_range(file, 0, min(_PEEK, storage.size(file)))
        for tool, pattern, remedy in _FOREIGN:
            if re.search(pattern, head):
                raise DataError(f"{file} has annotations in {tool}'s own form", fix=remedy)


def _kinds(folder: str) -> Iterator[str]:
    """Yield the kinds that a folder may be of, the surest first."""
    described = file_of(folder)
    if described.lower().endswith(YAML):
        yield "yolo"
    if _has_xml(storage.join(folder, "Annotations"), recursive=False):
        yield "voc"
    files = annotation_files(folder)
    if files and (len(files) > 1 or _looks_like_coco(files[0])):
        yield "coco"
    if described:
        yield "yolo"
    if _has_xml(folder, recursive=True):
        yield "voc"
    if files:
        yield "coco"


def _has_xml(folder: str, *, recursive: bool) -> bool:
    return any(name.lower().endswith(".xml") for name, _ in storage.scan(folder, recursive=recursive))


def _looks_like_coco(uri: str) -> bool:
    """Tell whether a JSON begins like COCO's; there may be one of another kind beside a set."""
    head = storage.read_range(uri, 0, min(_PEEK, storage.size(uri)))
    return any(key in head for key in _COCO_KEYS)
