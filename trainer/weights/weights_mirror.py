"""Published weights and their mirror `<data_root>/weights`, for clusters without internet access.

URIs:

    torchvision:ResNet50_Weights.IMAGENET1K_V2   a file of torchvision, by its enum name
    hf:ORG/NAME, hf:ORG/NAME@REVISION            a model on the Hugging Face hub, in save_pretrained's layout
    https://HOST/FILE, ...#sha256=HASH           a file on a web server

Any other URI (a path, s3://bucket/key) is read in place and not mirrored. In the mirror:

    torchvision/resnet50-11ad3fa6.pth            the first digits of the hash are in the name
    hf/ORG/NAME/REVISION/files.json (last)       name, hash and size of the file next to it; config.json too
    web/<hash of the address>/files.json (last)

A file's hash is checked after fetching and before each use.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urldefrag, urlsplit

from pydantic import BaseModel
from pydantic import dataclasses as models

from trainer import storage
from trainer.base import log
from trainer.base.daemon_threads import DaemonThreadPool
from trainer.base.errors import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    DamagedError,
    FormatError,
    MissingError,
    StorageError,
    first_line,
)
from trainer.base.json_files import STRICT
from trainer.base.temporary_folders import temporary_folder
from trainer.config.types import NO_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

TORCHVISION = "torchvision:"
HUB = "hf:"
HUB_ADDRESS = "HF_ENDPOINT"  # environment variable: the address of a mirror of the hub
HUB_TOKEN = "HF_TOKEN"  # noqa: S105
"""Environment variable: a token for private models, and for gated ones whose conditions were accepted."""
TORCHVISION_URL = "KUBEDET_TORCHVISION_URL"
"""Environment variable: your mirror of torchvision's folder of files."""
SUFFIXES = (".safetensors", ".pth", ".pt")  # file suffixes of tensor files in order of preference
TORCHVISION_FILES = {
    "ResNet18_Weights.IMAGENET1K_V1": "resnet18-f37072fd.pth",
    "ResNet50_Weights.IMAGENET1K_V2": "resnet50-11ad3fa6.pth",
    "ResNeXt50_32X4D_Weights.IMAGENET1K_V1": "resnext50_32x4d-7cdf4587.pth",
    "RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1": "retinanet_resnet50_fpn_v2_coco-5905b1c5.pth",
}
"""Names of the files that the recipes use: importing torchvision, which knows all, takes seconds."""
ANSWER_SECONDS = 5.0  # timeout for a publisher's first response
_TORCHVISION_HOME = "https://download.pytorch.org/models"
_MODEL = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?")
_TENSORS, _CONFIG = "model.safetensors", "config.json"
_WRAPPERS = ("ema", "module", "model", "state_dict")
"""Keys of files that hold more than tensors, the averaged weights first: a step's checkpoint of ours and
`{ema: {module}}` of D-FINE, DEIMv2 and RT-DETR."""
_MANIFEST = "files.json"
_LOG = logging.getLogger("weights")


@models.dataclass(config=STRICT, frozen=True)
class PublishedFile:
    """A file of tensors: name, URL, SHA-256 (or its first digits) and bytes; empty or 0 if unknown."""

    name: str
    url: str
    sha256: str = ""
    size: int = 0


@models.dataclass(config=STRICT, frozen=True)
class _MirrorListing:
    """Content of `files.json`."""

    kind: Literal["weights"]
    version: Literal[1]
    uri: str
    files: list[PublishedFile]


class _HubLargeFile(BaseModel):
    sha256: str = ""
    size: int = 0


class _HubFile(BaseModel):
    rfilename: str
    lfs: _HubLargeFile | None = None


class _HubModel(BaseModel):
    """The fields of the hub's API response for a model that we use."""

    sha: str  # Of the commit.
    siblings: list[_HubFile]


@dataclass(frozen=True)
class WeightFile:
    """A local file of tensors, and the URI in the configuration."""

    uri: str
    path: Path
    config_json: Mapping[str, Any] = field(default_factory=dict)
    """The config.json next to it, as `save_pretrained` writes it; empty without one."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name; for a .safetensors file, only the header is read."""
        if self.path.suffix != ".safetensors":
            return {name: tuple(value.shape) for name, value in self.state().items()}
        from safetensors import safe_open

        with self._translate_errors(), safe_open(self.path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def state(self) -> dict[str, "Tensor"]:
        """Read the tensors onto the CPU, by name; prefer the averaged weights of a checkpoint."""
        import torch  # Imported here so that steps that only look up weights start without it.
        from safetensors.torch import load_file

        with self._translate_errors():
            if self.path.suffix == ".safetensors":
                return load_file(self.path)
            # Some authors store arguments in a Namespace, which is safe to load.
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(self.path, map_location="cpu", weights_only=True)
            for wrapper in _WRAPPERS:
                if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
                    state = state[wrapper]
            if not isinstance(state, dict) or not all(
                isinstance(one, torch.Tensor) for one in state.values()
            ):
                raise ValueError("it is not a dictionary of tensors")
            return state

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # torch.load has no common error
            raise CheckpointError(
                f"weights {self.uri} cannot be read: {first_line(error)}",
                fix="use a .safetensors file, or a .pt/.pth file that contains only tensors",
            ) from None


def is_published(uri: str) -> bool:
    """Return whether a URI names published weights, which the mirror stores."""
    return uri.startswith((TORCHVISION, HUB)) or storage.scheme(uri) in storage.WEB


def mirror_uri(data_root: str) -> str:
    """Return the URI of a data root's mirror."""
    return storage.join(data_root, "weights")


def mirror_folder(uri: str, data_root: str) -> str:
    """Return the URI of the mirror's folder for published weights."""
    if uri.startswith(TORCHVISION):
        return storage.join(mirror_uri(data_root), "torchvision")
    if uri.startswith(HUB):
        return storage.join(mirror_uri(data_root), "hf", *_parse_hub_uri(uri))
    return storage.join(mirror_uri(data_root), "web", hashlib.sha256(uri.encode()).hexdigest()[:16])


def look_up_published_file(uri: str) -> PublishedFile:
    """Return the file of published weights; for a hub model, request it from the hub's API."""
    if uri.startswith(TORCHVISION):
        return torchvision_file(uri)
    if uri.startswith((HUB, f"{hub_address()}/")):
        from trainer.storage import web

        token = os.environ.get(HUB_TOKEN, "").strip()
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise StorageError(
                f"{HUB_TOKEN} in the environment is not a token: it contains spaces or special characters",
                fix="set it to the token only: hf_ followed by letters and digits",
            )
        web.use_token(hub_address(), token)
    if not uri.startswith(HUB):
        url, fragment = urldefrag(uri)
        sha256 = re.fullmatch(r"sha256=([0-9a-f]{8,64})", fragment)
        if fragment and not sha256:
            raise ConfigError(
                f"model.weights: {uri} does not end with a hash",
                fix="end it with #sha256= and the hash, or omit both",
            )
        return PublishedFile(urlsplit(url).path.rpartition("/")[2], url, sha256.group(1) if sha256 else "")
    name, revision = _parse_hub_uri(uri)
    address = f"{hub_address()}/api/models/{name}/revision/{quote(revision)}?blobs=true"
    try:
        model = storage.read_model(address, _HubModel, f"check {HUB_ADDRESS}, if it is set")
    except (DamagedError, FormatError) as error:
        raise StorageError(f"{address} does not respond like a model hub", fix=error.fix) from None
    files = {item.rfilename: item for item in model.siblings}
    if _TENSORS not in files:
        raise StorageError(
            f"{uri} has no {_TENSORS}, but contains " + (", ".join(sorted(files)[:10]) or "no file at all"),
            fix="choose a model that is published as safetensors in one file",
        )
    large = files[_TENSORS].lfs or _HubLargeFile()
    url = f"{hub_address()}/{name}/resolve/{model.sha}/{_TENSORS}"
    return PublishedFile(_TENSORS, url, large.sha256, large.size)


def hub_address() -> str:
    """Return the address of the Hugging Face hub, without a final slash."""
    return (os.environ.get(HUB_ADDRESS) or "https://huggingface.co").rstrip("/")


def torchvision_file(uri: str) -> PublishedFile:
    """Return the file of `torchvision:NAME` without a network request."""
    name = uri.removeprefix(TORCHVISION)
    path = TORCHVISION_FILES.get(name, "")
    if not path:
        from torchvision.models import get_weight

        try:
            weights = get_weight(name)
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"model.weights: torchvision has no weights {name!r}: {error}",
                fix="use a name such as torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1",
            ) from None
        path = weights.url.removeprefix(f"{_TORCHVISION_HOME}/")
    # The file name ends with the first digits of the SHA-256.
    prefix = re.search(r"-([0-9a-f]{8,})\.\w+$", path)
    home = (os.environ.get(TORCHVISION_URL) or _TORCHVISION_HOME).rstrip("/")
    return PublishedFile(path.rpartition("/")[2], f"{home}/{path}", prefix.group(1) if prefix else "")


def _parse_hub_uri(uri: str) -> tuple[str, str]:
    """Return the name and revision of a model on the hub."""
    match = _MODEL.fullmatch(uri.removeprefix(HUB))
    if (
        match is None
        or storage.escapes_folder(match["name"])
        or storage.escapes_folder(match["revision"] or "main")
    ):
        raise ConfigError(
            f"model.weights: {uri} is not a model on the hub",
            fix="write hf:ORG/NAME, e.g. hf:ustc-community/dfine-large-coco, or hf:ORG/NAME@REVISION",
        )
    return match["name"], match["revision"] or "main"


def find_in_mirror(uri: str, data_root: str) -> PublishedFile | None:
    """Return the file of published weights if the mirror has it, without contacting the publisher."""
    place = mirror_folder(uri, data_root)
    if uri.startswith(TORCHVISION):
        file = torchvision_file(uri)
    else:
        manifest = storage.join(place, _MANIFEST)
        if not storage.exists(manifest):
            return None
        remedy = f"delete {place}, and fetch the weights again"
        (file,) = storage.read_model(manifest, _MirrorListing, remedy).files
    return file if storage.exists(storage.join(place, file.name)) else None


def fetch_if_needed(uri: str, data_root: str) -> WeightFile:
    """Return weights as a local file; published weights are fetched if needed, and their hash is checked.

    Call this in one process of a run only, and send the tensors to the others.
    """
    if not is_published(uri):
        return _find_unpublished(uri)
    file, place = find_in_mirror(uri, data_root), mirror_folder(uri, data_root)
    path = storage.local_copy(storage.join(place, file.name)) if file else None
    if file is None or path is None or _find_fault(path, file):
        if file:
            _LOG.warning("weights %s in %s are damaged: fetching them again", uri, mirror_uri(data_root))
        with log.log_activity(_LOG, f"fetching {uri}"):
            file = _fetch(uri, data_root)
        path = storage.local_copy(storage.join(place, file.name))
    return WeightFile(uri, path, _read_config(place))


def check_available(uri: str, data_root: str) -> None:
    """Check that training can find its weights; fetch published ones that the mirror lacks."""
    if uri and not (is_published(uri) and find_in_mirror(uri, data_root)):
        fetch_if_needed(uri, data_root)


def _find_unpublished(uri: str) -> WeightFile:
    """Return the file at a path or object URI, or the only tensor file in a folder."""
    if not storage.exists(uri):
        names = sorted(name for name in storage.list_states(uri) if name.endswith(SUFFIXES))
        for suffix in SUFFIXES:
            candidates = [name for name in names if name.endswith(suffix)]
            if len(candidates) == 1:
                path = storage.local_copy(storage.join(uri, candidates[0]))
                return WeightFile(uri, path, _read_config(uri))
        if names or not uri.endswith(SUFFIXES):
            found = f"; it contains {', '.join(names)}" if names else ""
            raise StorageError(
                f"model.weights: {uri} is neither a file nor a folder with one file of tensors{found}",
                fix="use a .safetensors, .pth or .pt file, a folder with one of them, torchvision:NAME or "
                f"hf:ORG/NAME; {NO_WEIGHTS} trains from scratch",
            )
    try:
        return WeightFile(uri, storage.local_copy(uri), _read_config(uri.rpartition("/")[0] or "."))
    except StorageError as error:
        raise StorageError(f"model.weights: {error.message}", fix=error.fix) from None


def _read_config(folder: str) -> dict[str, Any]:
    """Return the content of config.json in a folder of weights; {} if there is none."""
    uri = storage.join(folder, _CONFIG)
    remedy = "remove it, or replace it with the model's file"
    return storage.read_model(uri, dict[str, Any], remedy) if storage.exists(uri) else {}


def _find_fault(path: Path, file: PublishedFile) -> str | None:
    digest, expected = _sha256(path), file.sha256
    if digest.startswith(expected):
        return None
    return f"its SHA-256 begins with {digest[: len(expected)]}, not with {expected}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_reachable(uri: str) -> bool:
    """Return whether a server responds within a few seconds, without retries."""
    from trainer.storage.retries import probe

    with DaemonThreadPool(1) as thread, contextlib.suppress(TimeoutError):  # A name lookup has no timeout.
        problem = thread.submit(probe, uri, uri, ANSWER_SECONDS).result(timeout=ANSWER_SECONDS)
        return problem is None or not problem.transient
    return False


def _fetch(uri: str, data_root: str) -> PublishedFile:
    """Fetch published weights into the mirror, and the manifest last; return the file with its full hash."""
    from trainer.storage import objects, web

    place, is_torchvision = mirror_folder(uri, data_root), uri.startswith(TORCHVISION)
    remedy = f"run `kubedet weights fetch {uri} --data-root {data_root}` where the internet can be reached"
    if uri.startswith(HUB):
        name, revision = _parse_hub_uri(uri)
        address = f"{hub_address()}/{name}/tree/{revision}"
    else:
        file = look_up_published_file(uri)
        address = file.url
        remedy += f", or put the file at {storage.join(place, file.name)}" if is_torchvision else ""
    try:
        with temporary_folder() as temporary:
            # Without internet, fail at once.
            if not _is_reachable(address):
                raise StorageError(f"its server does not respond within {ANSWER_SECONDS:g} s")
            file = look_up_published_file(uri)
            _LOG.info("fetching %s%s", file.url, f", {file.size / 2**20:.0f} MB" if file.size else "")
            path = temporary / "weights"
            objects.download(file.url, path)
            if fault := _find_fault(path, file):
                raise StorageError(
                    f"{file.url} differs from the published file; perhaps a proxy responded: {fault}"
                )
            if uri.startswith(HUB):
                with contextlib.suppress(MissingError):  # Some models have none.
                    described = storage.read_bytes(f"{file.url.removesuffix(_TENSORS)}{_CONFIG}")
                    storage.write_bytes(storage.join(place, _CONFIG), described)
            storage.upload(path, storage.join(place, file.name))
            file = replace(file, sha256=file.sha256 or _sha256(path), size=path.stat().st_size)
    except StorageError as error:
        if isinstance(error, web.AddressNotAllowed):
            remedy = error.fix
        elif uri.startswith(HUB) and isinstance(error, (AccessDeniedError, MissingError)):
            remedy = (
                f"check that {hub_address()}/{name} exists; for a private or gated model set {HUB_TOKEN}, in "
                "a cluster as a key of the Secret that `credentials` names. For a gated model, accept its "
                "conditions on that page; a fine-grained token needs the right to read gated repositories"
            )
        raise StorageError(
            f"model.weights: {uri} is not in {mirror_uri(data_root)}, and cannot be fetched from "
            f"{address}: {error.message.removeprefix(f'cannot read {address}: ')}",
            fix=f"{remedy}; --set model.weights={NO_WEIGHTS} trains from scratch",
            transient=False,
        ) from None
    if not is_torchvision:
        storage.write_json(storage.join(place, _MANIFEST), asdict(_MirrorListing("weights", 1, uri, [file])))
    return file
