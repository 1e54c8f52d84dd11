"""Published weights, and their mirror `<data_root>/weights`: what a cluster without internet trains from.

URIs of weights:

    torchvision:ResNet50_Weights.IMAGENET1K_V2   a file of torchvision, by the name it has there
    hf:ORG/NAME, hf:ORG/NAME@REVISION            a model of the Hugging Face hub, in save_pretrained's layout
    https://HOST/FILE, ...#sha256=HASH           a file of a web server

Anything else (a path, s3://bucket/key) is where it is, and is not mirrored. In the mirror:

    torchvision/resnet50-11ad3fa6.pth              the first digits of the hash are in the name
    hf/ORG/NAME/REVISION/files.json (last)         names, hashes and sizes of the files next to it
    web/<hash of the address>/files.json (last)

A file is compared with its hash when it is fetched and whenever it is used. A file of torchvision may be put
there by hand.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from trainer import storage
from trainer.base.errors import (
    CheckpointError,
    ConfigError,
    KubedetError,
    MissingError,
    RefusedError,
    StorageError,
    first_line,
)
from trainer.base.temporary_folders import temporary_folder
from trainer.config.types import NO_WEIGHTS
from trainer.storage import hub

if TYPE_CHECKING:
    from torch import Tensor

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


SUFFIXES = (".safetensors", ".pth", ".pt")
"""Ends of the names of files that hold tensors, the preferred one first."""


@dataclass(frozen=True)
class WeightFiles:
    """Weights as files on this machine: one of tensors, and what was published beside it."""

    uri: str
    """What the configuration names."""
    paths: Mapping[str, Path]
    """Files by name, e.g. model.safetensors and config.json."""

    @property
    def tensors(self) -> Path:
        """The file that holds the tensors.

        Raises:
            CheckpointError: there is none, or there are several.
        """
        for suffix in SUFFIXES:
            paths = [path for name, path in self.paths.items() if name.endswith(suffix)]
            if len(paths) == 1:
                return paths[0]
        if len(self.paths) == 1:  # Whatever it is called: the reader says what is wrong with it.
            return next(iter(self.paths.values()))
        raise CheckpointError(
            f"weights {self.uri} are not one file of tensors: {', '.join(sorted(self.paths)) or 'none'}",
            fix="give the URI of a .safetensors, .pth or .pt file, or of a folder with one of them",
        )

    def state(self) -> dict[str, "Tensor"]:
        """Read the tensors, by name, onto the CPU.

        Raises:
            CheckpointError: the file is damaged, or holds more than tensors.
        """
        path = self.tensors
        try:
            return _read(path)
        except Exception as error:  # torch.load has no common error of its own
            raise CheckpointError(
                f"weights {self.uri} cannot be read: {first_line(error)}",
                fix="give a .safetensors file, or a .pt/.pth file that holds nothing but tensors",
            ) from None

    def config(self) -> dict[str, Any]:
        """Read what the publisher says of the model, its config.json; {} where there is none.

        Raises:
            CheckpointError: it is no JSON object.
        """
        if "config.json" not in self.paths:
            return {}
        try:
            config = json.loads(self.paths["config.json"].read_bytes())
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise CheckpointError(
                f"config.json of weights {self.uri} is no JSON object", fix="fetch the weights anew"
            )
        return config


FILES = "files.json"
"""Names the files of a folder whose publisher does not name them for ever; written last."""

ANSWER_SECONDS = 5.0
"""For a publisher's first sign."""
_LOG = logging.getLogger("weights")


@dataclass(frozen=True)
class MirroredWeights:
    """Published weights as a mirror has them."""

    uri: str
    files: tuple[PublishedFile, ...]
    """Their files; none where only the publisher knows them and nothing was fetched yet."""
    missing: tuple[str, ...]
    """Names of those that are not there."""

    @property
    def complete(self) -> bool:
        """Whether all of them are there."""
        return bool(self.files) and not self.missing


def mirror_of(data_root: str) -> str:
    """Return the URI of a data root's mirror."""
    return storage.join(data_root, "weights")


def place_of(uri: str, data_root: str) -> str:
    """Return the URI of the folder that published weights have in a data root's mirror."""
    return storage.join(mirror_of(data_root), folder(uri))


def look_up(uri: str, data_root: str) -> MirroredWeights:
    """Tell what a mirror has of published weights. Asks no publisher, and reads no weights.

    Raises:
        ConfigError: the URI can name no weights.
        StorageError: the mirror cannot be read.
    """
    place = place_of(uri, data_root)
    if has_manifest(uri):
        manifest = storage.join(place, FILES)
        listing = storage.read_json(manifest)["files"] if storage.exists(manifest) else []
        files = tuple(PublishedFile(**item) for item in listing)
    else:
        files = (torchvision_file(uri),)
    absent = [one.name for one in files if not storage.exists(storage.join(place, one.name))]
    return MirroredWeights(uri, files, tuple(absent))


def obtain(uri: str, data_root: str) -> WeightFiles:
    """Return the files of weights on this machine, compared with their hashes; fetched where there are none.

    Call it in one process of a run: others get the tensors from that one.

    Args:
        uri: of published weights, of a file, or of a folder in save_pretrained's layout.
        data_root: in whose mirror published weights are kept.

    Raises:
        ConfigError: the URI can name no weights.
        StorageError: they are not in the mirror and cannot be fetched, or cannot be read.
    """
    if not is_published(uri):
        return _in_place(uri)
    mirrored = look_up(uri, data_root)
    if mirrored.complete:
        paths = {one.name: _checked(one, uri, data_root) for one in mirrored.files}
        if None not in paths.values():
            return WeightFiles(uri, {name: path for name, path in paths.items() if path})
        _LOG.warning("weights %s in %s are damaged: fetching them again", uri, mirror_of(data_root))
    mirrored = _fetch(uri, data_root)
    place = place_of(uri, data_root)
    return WeightFiles(
        uri, {one.name: storage.local_copy(storage.join(place, one.name)) for one in mirrored.files}
    )


def check_available(uri: str, data_root: str) -> None:
    """See to it that a training finds its weights: those that are in no mirror yet are fetched.

    Raises:
        ConfigError, StorageError: see `obtain`.
    """
    if uri and not (is_published(uri) and look_up(uri, data_root).complete):
        obtain(uri, data_root)


def _in_place(uri: str) -> WeightFiles:
    """Return the files behind a path or an object: itself, or those of a folder."""
    name = uri.rstrip("/").rpartition("/")[2]
    in_web = storage.scheme(uri) in storage.WEB
    # A folder may be called as a file of weights is: so it is asked what is there.
    is_file = in_web or storage.exists(uri)
    names = [] if is_file else [one for one in storage.list_states(uri) if one.endswith((*SUFFIXES, ".json"))]
    if any(one.endswith(SUFFIXES) for one in names):
        return WeightFiles(uri, {one: storage.local_copy(storage.join(uri, one)) for one in names})
    if is_file or name.endswith(SUFFIXES):
        try:
            return WeightFiles(uri, {name: storage.local_copy(uri)})
        except StorageError as error:
            raise StorageError(f"model.weights: {error.message}", fix=error.fix) from None
    raise StorageError(
        f"model.weights: {uri} is neither a file nor a folder with weights in it",
        fix="give a .safetensors, .pth or .pt file, a folder with one of them, torchvision:NAME or "
        f"hf:ORG/NAME; {NO_WEIGHTS} trains from scratch",
    )


def _checked(one: PublishedFile, uri: str, data_root: str) -> Path | None:
    """Return a file of the mirror on this machine; None if it is not the one that was published."""
    path = storage.local_copy(storage.join(place_of(uri, data_root), one.name))
    return path if _fault(path, one) is None else None


def _fault(path: Path, one: PublishedFile) -> str | None:
    """Compare a file with what its publisher says of it; returns what is wrong, if anything is."""
    digest = hash_of(path)
    if one.sha256 and not digest.startswith(one.sha256):
        return f"its SHA-256 begins with {digest[: len(one.sha256)]}, not with {one.sha256}"
    if one.git_sha1:
        content = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if blob != one.git_sha1:
            return f"its hash of git is {blob}, not {one.git_sha1}"
    return None


def hash_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(uri: str, data_root: str) -> MirroredWeights:
    """Fetch published weights into the mirror, the list of their files last."""
    place = place_of(uri, data_root)
    try:
        if uri.startswith(HUB):
            _check_answer(source(uri))
        files = tuple(_bring(one, place) for one in published_files(uri))
    except KubedetError as error:
        if not isinstance(error, StorageError):
            raise
        by_hand = ""
        if not has_manifest(uri):
            by_hand = f", or put the file at {storage.join(place, torchvision_file(uri).name)}"
        address = source(uri)
        elsewhere = (
            f"run `kubedet weights fetch {uri} --data-root {data_root}` where the internet can be reached"
        )
        raise StorageError(
            f"model.weights: {uri} is not in {mirror_of(data_root)}, and cannot be fetched from "
            f"{address}: {error.message.removeprefix(f'cannot read {address}: ')}",
            fix=f"{remedy(uri, error) or elsewhere}{by_hand}; "
            f"--set model.weights={NO_WEIGHTS} trains from scratch",
            passing=False,
        ) from None
    if has_manifest(uri):
        listing = {"kind": "weights", "version": 1, "uri": uri, "files": [asdict(one) for one in files]}
        storage.write_json(storage.join(place, FILES), listing)
    return MirroredWeights(uri, files, ())


def _bring(one: PublishedFile, place: str) -> PublishedFile:
    """Bring a file into the mirror; returns it with its whole hash and its size."""
    known = _in_caches(one)
    with temporary_folder() as temporary:
        if known is None:
            _check_answer(one.url)
            _LOG.info("fetching %s%s", one.url, f", {one.size / 2**20:.0f} MB" if one.size else "")
        path = known or storage.local_copy(one.url, temporary)
        fault = _fault(path, one)
        if fault:
            raise StorageError(
                f"{one.url} is not what was published: {fault}",
                fix="a proxy may have answered in its place: look at what it sends",
            )
        storage.upload(path, storage.join(place, one.name))
        return replace(one, sha256=one.sha256 or hash_of(path), size=path.stat().st_size)


def _check_answer(url: str) -> None:
    """Refuse to wait for a server that does not answer: where there is no internet, that is told at once."""
    if not storage.answers(url, ANSWER_SECONDS):
        raise StorageError(
            f"its server gives no answer in {ANSWER_SECONDS:g} s", fix="see whether there is internet"
        )


def _in_caches(one: PublishedFile) -> Path | None:
    """Return the file from where torchvision itself keeps what it fetched, if it is there and whole."""
    home = os.environ.get("TORCH_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "torch"
    )
    path = Path(home) / "hub" / "checkpoints" / one.name
    usable = one.sha256 and path.is_file() and _fault(path, one) is None
    return path if usable else None


def _read(path: Path) -> dict[str, "Tensor"]:
    import torch  # The steps that only look for weights start without it.
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it is not a dictionary of tensors")
    return state
