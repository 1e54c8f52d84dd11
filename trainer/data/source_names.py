"""Parses texts that name sources, without accessing the sources and without pyarrow."""

import os
import re
import unicodedata
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args
from urllib.parse import unquote

from trainer import storage
from trainer.base.errors import DataError, refuse_userinfo
from trainer.base.safe_text import parse_digits

FORMS = (
    "sample, openimages:, coco:2017, coco:PATH, voc:PATH, yolo:PATH, or the path of a COCO JSON, or of a "
    "COCO, VOC or YOLO folder, or a zip or tar of one"
)
KINDS = ("coco", "voc", "yolo")  # Prefixes of paths.

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

OPENIMAGES_SPLITS = {"train": "train", "validation": "val", "test": "test"}
_URI_PARAMETERS = ("images", "base", "pixels")
_LIMITS = {"images": (6, 1_000_000), "seed": (0, 2**31 - 1), "size": (96, 1024)}


@dataclass(frozen=True)
class Sample:
    """Parameters of the source `sample`."""

    images: int = 480
    seed: int = 0
    size: int = 160  # Typical side of an image, in pixels.

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "images=300,seed=0,size=160"."""
        values: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            low, high = _LIMITS.get(name.strip(), (0, -1))
            number = parse_digits(value.strip())
            if number is None or not low <= number <= high:
                ranges = ", ".join(f"{key} ({low} to {high})" for key, (low, high) in _LIMITS.items())
                raise DataError(f"source sample: cannot use {part!r}", fix=f"parameters: {ranges}")
            values[name.strip()] = number
        return cls(**values)

    @property
    def uri(self) -> str:
        """The text of the source with all parameters."""
        return "sample:" + ",".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class OpenImages:
    """Parameters of the source `openimages`."""

    splits: str = "train+validation+test"  # joined by +; ignored with an image list
    images: str = ""  # URI of a list with lines `split/image_id`, as for the official downloader
    subset: Literal["all", "mlperf"] = "all"  # mlperf: the 264 classes of MLPerf's detector.
    hierarchy: Literal["keep", "none"] = "keep"  # keep: use it in evaluation
    labels: Literal["keep", "none"] = "keep"
    """keep: record the verified classes of validation and test images."""
    base: str = "https://storage.googleapis.com/openimages"  # URI of the folder with the CSV files.
    pixels: str = "https://open-images-dataset.s3.amazonaws.com"
    """URI of the folder with <split>/<image id>.jpg, read anonymously."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "splits=train+validation,subset=mlperf"."""
        values: dict[str, Any] = {}
        choices = {field.name: get_args(field.type) for field in fields(cls)}
        for part in filter(None, map(str.strip, text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            wrong = name not in choices or not value or (choices[name] and value not in choices[name])
            if wrong or (name == "splits" and not set(value.split("+")) <= set(OPENIMAGES_SPLITS)):
                forms = {"splits": "+".join(OPENIMAGES_SPLITS)} | dict.fromkeys(_URI_PARAMETERS, "URI")
                expected = ", ".join(f"{key}={'|'.join(choices[key]) or forms[key]}" for key in choices)
                raise DataError(f"source openimages: cannot use {part!r}", fix=f"parameters: {expected}")
            values[name] = storage.absolute(os.path.expanduser(value)) if name in _URI_PARAMETERS else value
        return cls(**values)

    @property
    def uri(self) -> str:
        """The text of the source with all parameters that differ from the default."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        changed = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
        return "openimages:" + ",".join(changed)


@dataclass(frozen=True)
class Coco2017:
    """Parameters of the source `coco:2017`."""

    base: str = "http://images.cocodataset.org"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "" or "base=URI"."""
        name, _, value = (part.strip() for part in text.partition("="))
        if text.strip() and (name != "base" or not value):
            raise DataError(f"source coco:2017: cannot use {text!r}", fix="parameters: base=URI")
        return cls(storage.absolute(os.path.expanduser(value))) if value else cls()

    @property
    def uri(self) -> str:
        return "coco:2017" if self.base == Coco2017.base else f"coco:2017,base={self.base}"


def parse_published(source: str) -> Sample | OpenImages | Coco2017 | None:
    """Parse the parameters of a published data set or the sample; return None for a path."""
    refuse_userinfo(source, "the source")
    kind, _, rest = source.strip().partition(":")
    if kind == "sample":
        return Sample.parse(rest)
    if kind == "openimages":
        return OpenImages.parse(rest)
    if kind == "coco" and rest.partition(",")[0].strip() == "2017":
        return Coco2017.parse(rest.partition(",")[2])
    return None


def split_kind(source: str) -> tuple[str, str]:
    """Split a text into the kind ("" if none) and the path."""
    text = source.strip()
    kind, _, rest = text.partition(":")
    path = rest if kind in KINDS else text
    if not path.strip():
        raise DataError(f"source {source!r} has no path", fix=f"use {FORMS}")
    if path == text and storage.scheme(text) not in ("", "file", *storage.OBJECT_STORES, *storage.WEB):
        raise DataError(f"source {source!r}: unknown kind {kind!r}", fix=f"use {FORMS}")
    return kind if path != text else "", path


def source_uris(source: str) -> list[str]:
    """Return the URIs that a source reads, without accessing them."""
    if parameters := parse_published(source):
        named = [getattr(parameters, name, "") for name in _URI_PARAMETERS]
        return [uri for uri in named if uri and isinstance(uri, str)]
    return [split_kind(source)[1]]


_GENERIC_NAMES = re.compile(
    r"(instances|annotations?|data(sets?)?|images?|jpegimages|labels?|result|coco|voc|yolo|raw|exports?|default|"
    r"train(ing)?|val(id|idation)?|test)([-_. ]?(train|val|valid|test|data|coco|default|set|\d+))*",
    re.IGNORECASE,
)
"""Names of files and folders that do not identify a data set."""

_EXTENSIONS = re.compile(
    "(" + "|".join(map(re.escape, (*ARCHIVE_SUFFIXES, ".json", ".yaml", ".yml", ".txt", ".coco"))) + ")+$",
    re.IGNORECASE,
)


def dataset_name(source: str) -> str:
    """Derive a name of [A-Za-z0-9._-] for models from a `Source.uri`: `cards` for yolo:/data/cards."""
    kind, _, rest = source.partition(":")
    if kind in ("sample", "openimages"):
        return kind
    if kind == "coco" and rest.partition(",")[0] == "2017":
        return "coco-2017"
    path = rest if kind in KINDS else source
    path = unquote(path.partition("://")[2] or path)
    for part in reversed(path.split("/")):
        text = unicodedata.normalize("NFKD", _EXTENSIONS.sub("", part)).encode("ascii", "ignore").decode()
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:60]
        if plain and not _GENERIC_NAMES.fullmatch(plain):
            return plain
    return "detector"
