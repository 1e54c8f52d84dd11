"""Creates sources of images and boxes from the texts that name them.

docs/data.md lists the texts: `coco:PATH`, `sample:images=300`, or a path whose kind is recognized. A path may
be a URI that `trainer.storage` reads, or a zip or tar.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from trainer import storage
from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import source_names
from trainer.data.problem_counts import Problems
from trainer.data.source_names import ARCHIVE_SUFFIXES, FORMS, Coco2017, OpenImages, Sample
from trainer.data.sources.coco import Coco2017Source, CocoSource, annotation_files
from trainer.data.sources.files import UnpackedArchive, skip_hidden, unpack, visible_files
from trainer.data.sources.openimages import OpenImagesSource
from trainer.data.sources.sample import SampleSource
from trainer.data.sources.source import DEFAULT_OPTIONS, SOURCE_ROW, BoxOptions, Listing, Rows, Source
from trainer.data.sources.voc import VocSource
from trainer.data.sources.yolo import YAML, YoloSource, find_description
from trainer.storage import web

_PUBLISHED: dict[type, Callable[..., Source]] = {
    Sample: SampleSource,
    OpenImages: OpenImagesSource,
    Coco2017: Coco2017Source,
}


def parse(source: str, config: DataConfig | None = None) -> Source:
    """Create the source that a text names, with boxes_from and box_format of `config`.

    Adds its servers and buckets, and those in allow_hosts, to the allow-list of `trainer.storage.web`.

    Raises:
        DataError: the text names no source, or boxes_from or box_format is set for a non-COCO source.
    """
    config = config or DataConfig()
    web.allow(source_names.source_uris(source), config.allow_hosts)
    options = BoxOptions(config.boxes_from, config.box_format)
    if parameters := source_names.parse_published(source):
        return _apply_options(_PUBLISHED[type(parameters)](**vars(parameters)), options)
    kind, path = source_names.split_kind(source)
    uri = storage.absolute(os.path.expanduser(path) if storage.is_local(path) else path)
    if storage.is_local(uri) and not os.path.exists(uri):
        raise DataError(f"source {source!r}: {uri} does not exist", fix="check the path")
    if storage.is_local(uri) and os.path.isdir(uri) and not os.listdir(uri):
        raise DataError(f"source {source!r}: the folder {uri} is empty", fix="put the data set there")
    if uri.lower().endswith(ARCHIVE_SUFFIXES):
        return ArchiveSource(kind, uri, options)
    kind = kind or recognize_kind(uri)
    if not kind:
        fix = f"use {FORMS}; a folder must contain annotations/*.json, XML files (VOC) or data.yaml (YOLO)"
        raise DataError(f"source {source!r} is neither a COCO JSON nor a COCO, VOC or YOLO folder", fix=fix)
    return _apply_options(_make_source(kind, uri), options)


def _make_source(kind: str, uri: str, confined: str = "") -> Source:
    """Create a source of a kind at a URI; `confined` is a folder that no path may leave."""
    if kind == "coco":
        return CocoSource(uri, confined=confined)
    return YoloSource(uri, confined) if kind == "yolo" else VocSource(uri)


def _apply_options(source: Source, options: BoxOptions) -> Source:
    """Apply box options; raise DataError if any is set and the source is not COCO."""
    if isinstance(source, CocoSource | Coco2017Source):
        return replace(source, options=options)
    for name, value, default in zip(BoxOptions._fields, options, DEFAULT_OPTIONS, strict=True):
        if value != default:
            fix = "leave it unset"
            raise DataError(
                f"source {source.uri}: data.{name}={value} only applies to COCO annotations", fix=fix
            )
    return source


def recognize_kind(uri: str) -> str:
    """Return the kind of a folder or file: coco, voc or yolo; "" if it is none of them."""
    if uri.lower().endswith((".json", *YAML)):
        return "coco" if uri.lower().endswith(".json") else "yolo"
    if storage.scheme(uri) in storage.WEB:
        return ""
    described = find_description(uri)
    signs: list[tuple[str, Callable[[], bool]]] = [  # The most reliable first.
        ("yolo", lambda: described.lower().endswith(YAML)),
        ("voc", lambda: _has_xml(storage.join(uri, "Annotations"), recursive=False)),
        ("coco", lambda: _contains_coco(annotation_files(uri))),
        ("yolo", lambda: bool(described)),
        ("voc", lambda: _has_xml(uri, recursive=True)),
        ("coco", lambda: bool(annotation_files(uri))),
    ]
    return next((kind for kind, holds in signs if holds()), "")


def _contains_coco(files: list[str]) -> bool:
    # Label Studio's notes.json also has categories, so they prove nothing.
    keys = (b'"images"', b'"annotations"')
    return len(files) > 1 or any(key in _read_head(file) for file in files for key in keys)


def _has_xml(folder: str, *, recursive: bool) -> bool:
    return any(name.lower().endswith(".xml") for name, _ in visible_files(folder, recursive=recursive))


def _read_head(uri: str) -> bytes:
    return storage.read_range(uri, 0, min(1024 * 1024, storage.size(uri)))


@dataclass(frozen=True)
class ArchiveSource(Source):
    """A data set in a zip or tar, which is unpacked into a temporary folder."""

    kind: str  # coco, voc or yolo; "": recognized after unpacking.
    location: str  # URI of the archive.
    options: BoxOptions = DEFAULT_OPTIONS

    @property
    def uri(self) -> str:
        """The kind and URI of the archive, which is unpacked if its kind is unknown."""
        return f"{self.kind or self._kind_and_root(unpack(self.location))[0]}:{self.location}"

    @property
    def images_uri(self) -> str:
        return f"archive:{self.location}"

    def listing(self) -> Listing:
        """Unpack the archive and list its content; origins and messages name the archive."""
        unpacked = unpack(self.location)
        try:
            kind, root = self._kind_and_root(unpacked)
            listing = _apply_options(_make_source(kind, root, unpacked.folder), self.options).listing()
        except DataError as error:
            raise DataError(error.message.replace(unpacked.folder, self.location), fix=error.fix) from None
        lines = [f"{name} {version}\n" for name, version in sorted(unpacked.versions.items())]
        digest = hashlib.sha256(f"{self.uri}\n".encode())
        digest.update("".join(lines).encode("utf-8", "surrogateescape"))
        splits = {
            split: Rows(partial(self._batches, rows, listing.problems, unpacked))
            for split, rows in listing.splits.items()
        }
        self._name_archive(listing.problems, unpacked)
        for name in unpacked.hidden:
            skip_hidden(name, listing.problems)
        return replace(listing, splits=splits, state=digest.hexdigest())

    def _name_archive(self, problems: Problems, unpacked: UnpackedArchive) -> None:
        """Name the archive instead of the temporary folder in the examples of problems."""
        for examples in problems.examples.values():
            examples[:] = [example.replace(unpacked.folder, self.location) for example in examples]

    def _batches(
        self, rows: Rows, problems: Problems, unpacked: UnpackedArchive, _: Problems
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows whose origins and versions do not depend on the temporary folder."""
        folder = f"{unpacked.folder}/"
        for batch in rows.batches():
            origins, versions = batch["origin"].to_pylist(), batch["version"].to_pylist()
            for row, origin in enumerate(origins):
                if origin.startswith(folder):
                    name = origin.removeprefix(folder)
                    origins[row], versions[row] = f"{self.location}#{name}", unpacked.versions.get(name, "")
            details = pc.replace_substring(batch["fault_detail"], unpacked.folder, self.location)
            changed = {"origin": pa.array(origins, pa.string()), "version": pa.array(versions, pa.string())}
            changed["fault_detail"] = details
            arrays = [changed.get(name, batch[name]) for name in SOURCE_ROW.names]
            yield pa.RecordBatch.from_arrays(arrays, schema=SOURCE_ROW)
        self._name_archive(problems, unpacked)

    def read(self, origin: str) -> bytes:
        archive, _, name = origin.partition("#")
        if archive != self.location or not name:
            return super().read(origin)
        return storage.read_bytes(storage.join(unpack(self.location).folder, name))

    def _kind_and_root(self, unpacked: UnpackedArchive) -> tuple[str, str]:
        """Return the kind and the folder of the data set in the archive, often its only top folder."""
        parents = [name.split("/")[:-1] for name in unpacked.versions]
        shared = os.path.commonprefix(parents)  # noqa: RUF071 (it accepts lists too)
        roots = ["/".join([unpacked.folder, *shared[:depth]]) for depth in range(len(shared) + 1)]
        for root in reversed(roots):
            kind = recognize_kind(root)
            if kind and self.kind in ("", kind):
                return kind, root
        if self.kind:
            return self.kind, roots[-1]
        fix = "pack a folder that contains a COCO JSON, VOC's XML files, or a YOLO data.yaml, and its images"
        raise DataError(f"{self.location} contains no known data set", fix=fix)
