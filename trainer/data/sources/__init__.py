"""Where images and boxes come from.

    sample                      images the program draws; sample:images=300,seed=0,size=160
    coco:PATH                   a COCO JSON, or a folder with such files; images beside it or by coco_url
    coco:2017                   COCO 2017 from its zips; coco:2017,base=URI from a mirror
    voc:PATH                    PASCAL VOC's XML: Annotations, JPEGImages, ImageSets/Main, or beside images
    yolo:PATH                   a YOLO folder with data.yaml, or that file
    openimages:PARAMETERS       Open Images V7; see trainer.data.sources.openimages
    PATH                        a folder or file that is recognised as one of these three

PATH may be a URI that `trainer.storage` reads, and a zip or tar of such a folder.
"""

import os
from dataclasses import replace

from trainer import storage
from trainer.base.errors import DataError, refuse_userinfo
from trainer.config.schema import DataConfig
from trainer.data.sources.archive_source import ArchiveSource
from trainer.data.sources.archives import is_archive
from trainer.data.sources.coco import CocoSource
from trainer.data.sources.coco_2017 import Coco2017Source
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
