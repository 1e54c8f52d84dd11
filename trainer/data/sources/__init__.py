"""Where images and boxes come from.

    sample                      images the program draws; sample:images=300,seed=0,size=160
    coco:PATH                   a COCO JSON, or a folder with such files; images beside it or by coco_url
    coco:2017                   COCO 2017 from its zips; coco:2017,base=URI from a mirror
    voc:PATH                    PASCAL VOC's XML: Annotations, JPEGImages, ImageSets/Main, or beside images
    yolo:PATH                   a YOLO folder with data.yaml, or that file
    openimages:PARAMETERS       Open Images V7; see trainer.data.sources.openimages
    PATH                        a folder or file that is recognised as one of these three

PATH may be a URI that `trainer.storage` reads, and a zip or tar of such a folder.

A short name for a data set, which its models have where nobody gives one.
"""

import os
import re
import unicodedata
from dataclasses import replace
from urllib.parse import unquote

from trainer import storage
from trainer.base.errors import DataError, refuse_userinfo
from trainer.config.schema import DataConfig
from trainer.data.sources.archives import SUFFIXES, ArchiveSource, is_archive
from trainer.data.sources.coco import Coco2017Source, CocoSource
from trainer.data.sources.openimages import OpenImagesSource
from trainer.data.sources.recognition import KINDS, kind_of, refuse_foreign
from trainer.data.sources.sample import SampleSource
from trainer.data.sources.source import Reading, Source, refuse_reading
from trainer.data.sources.yolo import YoloSource

FORMS = (
    "sample, openimages:, coco:2017, coco:PATH, voc:PATH, yolo:PATH, or the path of a COCO JSON, or of a "
    "COCO, VOC or YOLO folder, or a zip or tar of one"
)


def parse(source: str, config: DataConfig | None = None) -> Source:
    """Return the source that a text names.

    Args:
        source: the text.
        config: boxes_from, box_format and allow_hosts are used; None takes the defaults.

    Raises:
        DataError: the text is empty, of an unknown kind, or names nothing that is known; or boxes_from or
            box_format is set for a source that is not COCO.
    """
    parsed = _published(source) or _of_place(source)
    config = config or DataConfig()
    reading = Reading(config.boxes_from, config.box_format)
    if isinstance(parsed, YoloSource):
        parsed = replace(parsed, allow_hosts=tuple(config.allow_hosts))
    if isinstance(parsed, CocoSource | Coco2017Source | ArchiveSource):
        return replace(parsed, reading=reading)
    refuse_reading(parsed, reading)
    return parsed


def _of_place(source: str) -> Source:
    """Return the source that a text names by where it is."""
    kind, path = _kind_and_path(source)
    uri = _located(path, source)
    if is_archive(uri):
        return ArchiveSource(kind, uri)
    kind = kind or kind_of(uri)
    refuse_foreign(uri, kind)
    if kind:
        return KINDS[kind](uri, "")
    raise DataError(
        f"source {source!r} is neither a COCO JSON nor a COCO, VOC or YOLO folder",
        fix=f"use {FORMS}; a VOC folder holds XML files, a COCO folder annotations/*.json, a YOLO folder "
        "data.yaml",
    )


def places(source: str) -> list[str]:
    """Return the URIs that a source is read from, without looking at them: another machine may do that.

    Raises:
        DataError: as `parse`, but for what is or is not there.
    """
    published = _published(source)
    if published:
        named = [getattr(published, name, "") for name in ("images", "base", "pixels")]
        return [uri for uri in named if uri and isinstance(uri, str)]
    return [_kind_and_path(source)[1]]


def _published(source: str) -> Source | None:
    """Return the source that a text names by what everybody calls it, or None."""
    refuse_userinfo(source, "the source")
    text = source.strip()
    kind, _, rest = text.partition(":")
    if kind == "sample" and (rest or text in ("sample", "sample:")):
        return SampleSource.parse(rest)
    if kind == "openimages":
        return OpenImagesSource.parse(rest)
    if kind == "coco" and rest.partition(",")[0].strip() == "2017":
        return Coco2017Source.parse(rest.partition(",")[2])
    return None


def _kind_and_path(source: str) -> tuple[str, str]:
    """Return "coco", "voc", "yolo", or "" where that is to be seen, and where it is."""
    text = source.strip()
    kind, _, rest = text.partition(":")
    path = rest if kind in KINDS else text
    if not path.strip():
        raise DataError(f"source {source!r} names nothing", fix=f"use {FORMS}")
    if path == text and storage.scheme(text) not in ("", "file", *storage.OBJECT_STORES, *storage.WEB):
        raise DataError(f"source {source!r}: unknown kind {kind!r}", fix=f"use {FORMS}")
    return kind if path != text else "", path


def _located(path: str, source: str) -> str:
    """Return the absolute URI of a source's path; check that it is there if it is local."""
    if not storage.is_local(path):
        return storage.absolute(path)
    uri = storage.absolute(os.path.expanduser(path))
    if not os.path.exists(uri):
        raise DataError(f"source {source!r}: {uri} does not exist", fix="check the path")
    if os.path.isdir(uri) and not os.listdir(uri):
        raise DataError(f"source {source!r}: the folder {uri} is empty", fix="put the data set there")
    return uri


_FALLBACK = "detector"
_LONGEST = 60
_GENERAL = re.compile(
    r"(instances|annotations?|data(sets?)?|images?|jpegimages|labels?|result|coco|voc|yolo|raw|exports?|default|"
    r"train(ing)?|val(id|idation)?|test)([-_. ]?(train|val|valid|test|data|coco|default|set|\d+))*",
    re.IGNORECASE,
)
"""Names of files and folders that do not tell one data set from another."""


def name_of(source: str) -> str:
    """Return a name of [A-Za-z0-9._-] for a source: `cards` for yolo:/data/cards/data.yaml.

    Args:
        source: what `Source.uri` gives.
    """
    kind, _, rest = source.partition(":")
    if kind in ("sample", "openimages"):
        return kind
    if kind == "coco" and rest.partition(",")[0] == "2017":
        return "coco-2017"
    path = rest if kind in ("coco", "voc", "yolo") else source
    path = unquote(path.partition("://")[2] or path)
    for part in reversed(path.split("/")):
        plain = _plain(_without_suffix(part))
        if plain and not _GENERAL.fullmatch(plain):
            return plain
    return _FALLBACK


def _without_suffix(part: str) -> str:
    """Return the name of a file without what tells its form."""
    for suffix in sorted((*SUFFIXES, ".json", ".yaml", ".yml", ".txt", ".coco"), key=len, reverse=True):
        if part.lower().endswith(suffix):
            return _without_suffix(part[: -len(suffix)])
    return part


def _plain(part: str) -> str:
    """Return what can be a folder's name anywhere."""
    text = unicodedata.normalize("NFKD", part).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:_LONGEST]
