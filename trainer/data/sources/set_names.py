"""A short name for a data set, which its models have where nobody gives one."""

import re
import unicodedata
from urllib.parse import unquote

from trainer.data.sources.archives import SUFFIXES

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
