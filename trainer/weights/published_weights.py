"""What URIs of weights name: files of torchvision, of a hub of models, of any web server.

    torchvision:ResNet50_Weights.IMAGENET1K_V2   a file of torchvision, by the name it has there
    hf:ORG/NAME, hf:ORG/NAME@REVISION            a model of the Hugging Face hub, in save_pretrained's layout
    https://HOST/FILE, ...#sha256=HASH           a file of a web server

Anything else (a path, s3://bucket/key) is where it is, and is not mirrored.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from trainer import storage
from trainer.base.errors import ConfigError, KubedetError, MissingError, RefusedError, StorageError
from trainer.storage import hub

TORCHVISION = "torchvision:"
HUB = "hf:"

TORCHVISION_URL = "KUBEDET_TORCHVISION_URL"
"""Environment variable: the folder of the web that has torchvision's files, where it is a mirror of yours."""

_TORCHVISION_HOME = "https://download.pytorch.org/models"
_MODEL = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?")
_PREFIX = re.compile(r"-([0-9a-f]{8,})\.\w+$")
"""The first digits of the SHA-256 at the end of the names that torchvision gives its files."""
_TENSORS = "model.safetensors"
_BESIDE = ("config.json", "preprocessor_config.json")
"""What a hub's model may have beside its tensors, of what anybody needs here."""


@dataclass(frozen=True)
class PublishedFile:
    """One file, as its publisher offers it."""

    name: str
    """In the mirror's folder."""
    url: str
    sha256: str = ""
    """Its hash, or the first digits of it; empty where the publisher tells none."""
    size: int = 0
    """Bytes; 0 where the publisher does not tell."""
    git_sha1: str = ""
    """Its hash as git has it, which a hub tells of small files."""


def is_published(uri: str) -> bool:
    """Tell whether a URI of weights names what the mirror keeps, and not a place of its own."""
    return uri.startswith((TORCHVISION, HUB)) or storage.scheme(uri) in storage.WEB


def folder(uri: str) -> str:
    """Return the folder of published weights below the mirror; asks nobody.

    Raises:
        ConfigError: the URI is not of the form that it has to have.
    """
    if uri.startswith(TORCHVISION):
        return "torchvision"
    if uri.startswith(HUB):
        name, revision = _model(uri)
        return f"hf/{name}/{revision}"
    return f"web/{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def has_manifest(uri: str) -> bool:
    """Tell whether names and hashes are known from the publisher alone, and so written down in the mirror."""
    return not uri.startswith(TORCHVISION)


def torchvision_file(uri: str) -> PublishedFile:
    """Return the file behind `torchvision:NAME`; asks nobody.

    Raises:
        ConfigError: this torchvision has no weights of that name.
    """
    from torchvision.models import get_weight

    name = uri.removeprefix(TORCHVISION)
    try:
        weights = get_weight(name)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model.weights: torchvision has no weights {name!r}: {error}",
            fix="use a name such as torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1",
        ) from None
    file_name = weights.url.rpartition("/")[2]
    prefix = _PREFIX.search(file_name)
    home = (os.environ.get(TORCHVISION_URL) or _TORCHVISION_HOME).rstrip("/")
    return PublishedFile(
        file_name,
        weights.url.replace(_TORCHVISION_HOME, home),
        prefix.group(1) if prefix else "",
        round(weights.meta.get("_file_size", 0) * 2**20),
    )


def source(uri: str) -> str:
    """Return the address that weights are fetched from, for people."""
    if uri.startswith(TORCHVISION):
        return torchvision_file(uri).url
    if uri.startswith(HUB):
        name, revision = _model(uri)
        return f"{hub.address()}/{name}/tree/{revision}"
    return _bare(uri)


def published_files(uri: str) -> tuple[PublishedFile, ...]:
    """Return the files of published weights; a hub is asked for them.

    Raises:
        ConfigError: there are no weights of that name, or the URI is not of the form that it has to have.
        StorageError: the hub cannot be reached, or has no such model, or one in another form.
    """
    if uri.startswith(TORCHVISION):
        return (torchvision_file(uri),)
    if uri.startswith(HUB):
        return _hub_files(uri)
    sha256 = re.fullmatch(r"sha256=([0-9a-f]{8,64})", urlsplit(uri).fragment)
    if urlsplit(uri).fragment and not sha256:
        raise ConfigError(
            f"model.weights: {uri} ends with no hash",
            fix="end it with #sha256= and the hash, or with nothing",
        )
    name = urlsplit(uri).path.rpartition("/")[2]
    return (PublishedFile(name, _bare(uri), sha256.group(1) if sha256 else ""),)


def _bare(uri: str) -> str:
    return urlsplit(uri)._replace(fragment="").geturl()


def remedy(uri: str, error: KubedetError) -> str:
    """Return what to do where a hub refuses its files to whoever asks; empty for any other reason."""
    if not uri.startswith(HUB) or not isinstance(error, (RefusedError, MissingError)):
        return ""
    page = f"{hub.address()}/{_model(uri)[0]}"
    if not hub.has_token():
        return (
            f"see whether {page} is there; for a private or gated model set {hub.TOKEN}, in a cluster "
            "as a key of the Secret that `credentials` names"
        )
    return (
        f"see on {page} whether the account of {hub.TOKEN} may read it: a gated model's conditions are "
        "accepted there, a fine-grained token needs the right to read gated repositories, an expired one is "
        "refused"
    )


def _model(uri: str) -> tuple[str, str]:
    """Return the model's name and revision of a hub's URI."""
    match = _MODEL.fullmatch(uri.removeprefix(HUB))
    if match is None or storage.climbs(match["name"]) or storage.climbs(match["revision"] or "main"):
        raise ConfigError(
            f"model.weights: {uri} names no model of the hub",
            fix="write hf:ORG/NAME, e.g. hf:ustc-community/dfine-large-coco, or hf:ORG/NAME@REVISION",
        )
    return match["name"], match["revision"] or "main"


def _hub_files(uri: str) -> tuple[PublishedFile, ...]:
    name, revision = _model(uri)
    address = f"{hub.address()}/api/models/{name}/revision/{quote(revision)}?blobs=true"
    try:
        description = json.loads(storage.read_bytes(address))
        commit, listing = description["sha"], {item["rfilename"]: item for item in description["siblings"]}
    except (ValueError, KeyError, TypeError):
        raise StorageError(
            f"{address} does not answer as a hub of models does", fix=f"check {hub.ADDRESS}, if it is set"
        ) from None
    if _TENSORS not in listing:
        raise StorageError(
            f"{uri} holds no {_TENSORS}, but " + (", ".join(sorted(listing)[:10]) or "no file at all"),
            fix="choose a model that is published as safetensors in one file",
        )
    names = [_TENSORS, *(beside for beside in _BESIDE if beside in listing)]
    base = f"{hub.address()}/{name}/resolve/{commit}"
    return tuple(_hub_file(file_name, f"{base}/{file_name}", listing[file_name]) for file_name in names)


def _hub_file(name: str, url: str, item: dict[str, Any]) -> PublishedFile:
    large = item.get("lfs") or {}
    size = large.get("size") or item.get("size") or 0
    return PublishedFile(name, url, large.get("sha256", ""), size, "" if large else item.get("blobId", ""))
