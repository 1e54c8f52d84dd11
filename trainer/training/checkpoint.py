"""Writes checkpoints atomically, and reads them with a checksum and without running code from them.

A run folder contains `checkpoints/step-00001234.pt` (everything needed to resume) and `best.pt` (the best
weights and the metadata to use them). Each is a zip archive by `torch.save`; the archive's comment is the
sha256 of all preceding bytes.
"""

import hashlib
import io
import logging
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from trainer import storage
from trainer.base import json_files
from trainer.base.errors import CheckpointError, DamagedError, first_line
from trainer.base.os_errors import raise_if_exhausted, translate_oserror
from trainer.config import parsing
from trainer.config.schema import Config
from trainer.model.architecture import Architecture, build

VERSION = 2
BEST = "best.pt"
WEIGHTS = "model.safetensors"  # file of tensors in a folder of weights
_PREFIX, _SUFFIX = "step-", ".pt"
_DIGEST_PREFIX = b"sha256:"
_DIGEST_BYTES = len(_DIGEST_PREFIX) + 64
_END_BYTES = 22
"""Size of the last record of a zip archive, which ends with the length of the comment (APPNOTE 4.3.16)."""
_BLOCK_BYTES = 8 * 1024 * 1024
_CHECKPOINT_FIX = (
    "use another checkpoint of the same run, or run its training again to resume from a valid one"
)
_LOG = logging.getLogger("checkpoint")

_KEYS_THAT_MAY_CHANGE = {
    "data", "evaluation", "export", "loader.workers", "loader.prefetch", "train.epochs",
    "train.minutes", "train.trackers", "train.patience", "train.log_every",
    "train.validate_every", "train.checkpoint_steps", "train.checkpoint_minutes", "train.keep_checkpoints",
    "train.batch_size", "train.global_batch",
}  # fmt: skip
"""Sections and keys that a resumed run may change. The global batch is compared separately."""


State = dict[str, Any]
"""Content of a checkpoint, in types that torch.load reads safely: `TrainState.state_dict` with metadata."""


@dataclass(config={"extra": "ignore", "strict": True}, frozen=True)
class _Category:
    """Required fields of a class in a checkpoint."""

    id: int
    name: str


class DamagedCheckpoint(CheckpointError):
    """The bytes of a checkpoint have changed; an older checkpoint may be valid."""


def write(state: State, uri: str) -> None:
    """Write a checkpoint atomically."""
    buffer = io.BytesIO()
    torch.save({"version": VERSION, **state}, buffer)
    buffer.seek(-2, os.SEEK_END)
    buffer.write(struct.pack("<H", _DIGEST_BYTES) + _DIGEST_PREFIX)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    buffer.write(digest.encode())
    storage.write_bytes(uri, buffer.getvalue(), confirm=True)


def write_step(state: State, folder: str, step: int, keep: int) -> None:
    """Write the checkpoint of a step, and delete all but the newest `keep` checkpoints."""
    write(state, step_uri(folder, step))
    for name in _list_checkpoints(folder)[:-keep]:
        storage.delete(storage.join(folder, name))


def read_step(folder: str, step: int) -> State:
    """Read the checkpoint of one step; see `read`."""
    return read(step_uri(folder, step))


def step_uri(folder: str, step: int) -> str:
    """Return the URI of the checkpoint of a step."""
    return storage.join(folder, f"{_PREFIX}{step:08d}{_SUFFIX}")


def read(uri: str) -> State:
    """Read a checkpoint onto the CPU; raise CheckpointError if it is damaged or unsafe."""
    path = storage.local_copy(uri)
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as thread:
        hashing = thread.submit(_verify_digest, path, uri)  # Hashing takes as long as loading.
        try:
            state: State = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds of errors.
            has_digest = hashing.result()
            raise_if_exhausted(error, f"checkpoint {uri}")
            # Omit torch's message, which may recommend unsafe loading.
            if has_digest:
                raise CheckpointError(
                    f"checkpoint {uri} contains unsafe objects, although its checksum is correct",
                    fix="use the kubedet version that wrote it, or another file",
                ) from None
            raise DamagedCheckpoint(
                f"checkpoint {uri} cannot be read: it is damaged, or contains unsafe objects",
                fix=_CHECKPOINT_FIX,
            ) from None
        has_digest = hashing.result()
    version = state.get("version") if isinstance(state, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise CheckpointError(
            f"checkpoint {uri} has the format {version}, but this kubedet reads format {VERSION}",
            fix="use the kubedet version that wrote it",
        )
    ours = version == VERSION and "model" in state and isinstance(state.get("step"), int)
    if not ours or not isinstance(state.get("config"), str):
        raise CheckpointError(
            f"{uri} is not a kubedet checkpoint",
            fix="use a file that `train` wrote; set model.weights for plain weights",
        )
    if not has_digest:
        raise DamagedCheckpoint(f"checkpoint {uri} is damaged: its checksum is missing", fix=_CHECKPOINT_FIX)
    return state


def verify(uri: str) -> None:
    """Verify the checksum of a checkpoint without loading it; raises the errors of `read`."""
    if not _verify_digest(storage.local_copy(uri), uri):
        read(uri)


def read_digest(uri: str) -> str:
    """Return the sha256 stored in a checkpoint, or "" if there is none. It is not verified."""
    path = storage.local_copy(uri)
    with translate_oserror(uri, "read"), path.open("rb") as file:
        return _read_digest_at_end(file)


def _read_digest_at_end(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_BYTES - _DIGEST_BYTES))
    digest = file.read()[_END_BYTES:]
    return (
        digest.removeprefix(_DIGEST_PREFIX).decode("ascii", "replace")
        if digest.startswith(_DIGEST_PREFIX)
        else ""
    )


def _verify_digest(path: Path, uri: str) -> bool:
    """Compare a checkpoint with its stored digest; return whether it has one."""
    with translate_oserror(uri, "read"), path.open("rb") as file:
        expected = _read_digest_at_end(file)
        if not expected:
            return False
        digest, left = hashlib.sha256(), file.seek(0, os.SEEK_END) - 64
        file.seek(0)
        while left:
            block = file.read(min(_BLOCK_BYTES, left))
            digest.update(block)
            left -= len(block)
    if digest.hexdigest() != expected:
        if not storage.is_local(uri):
            storage.drop_copy(uri)
        raise DamagedCheckpoint(
            f"checkpoint {uri} is damaged: its sha256 is {digest.hexdigest()}, not {expected}",
            fix=_CHECKPOINT_FIX,
        )
    return True


def read_latest(folder: str) -> State | None:
    """Read the newest valid checkpoint of a folder; return None if the folder has no checkpoints.

    Raises StorageError if storage fails, so that a run does not start from scratch by mistake.
    """
    names = _list_checkpoints(folder)
    for name in reversed(names):
        try:
            return read(storage.join(folder, name))
        except (DamagedCheckpoint, DamagedError) as error:
            _LOG.warning("%s; trying the one before it", error.message)
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {folder} can be read: all are damaged",
            fix="start a run under another name",
        )
    return None


def _list_checkpoints(folder: str) -> list[str]:
    names = storage.list_files(folder)
    return sorted(name for name in names if name.startswith(_PREFIX) and name.endswith(_SUFFIX))


def check_same_run(state: State, config: Config, fingerprint: str, global_batch: int) -> None:
    """Raise CheckpointError with the differing keys if a checkpoint has another configuration or data."""
    # Loading the configuration adds defaults for keys that the checkpoint lacks.
    saved = parsing.flatten(
        asdict(parsing.from_json(state["config"], where="the checkpoint's configuration"))
    )
    now = parsing.flatten(asdict(config))
    pairs = [(key, saved.get(key), now.get(key)) for key in sorted(saved.keys() | now.keys())]
    pairs = [pair for pair in pairs if not {pair[0], pair[0].split(".")[0]} & _KEYS_THAT_MAY_CHANGE]
    pairs += [("shards", state["fingerprint"], fingerprint)]
    pairs += [("global batch", state["global_batch"], global_batch)]
    differing = [f"{key}: {old!r} in the checkpoint, {new!r} now" for key, old, new in pairs if old != new]
    if differing:
        raise CheckpointError(
            "the run folder contains a checkpoint with a different configuration:\n  "
            + "\n  ".join(differing),
            fix="start a run under another name, or restore these settings to resume this one",
        )


def evaluated_weights(state: State) -> dict[str, Tensor]:
    """Return the weights to evaluate: the moving average if there is one, else the trained weights."""
    weights: dict[str, Tensor] = state.get("ema") or state["model"]
    return weights


def load_model(uri: str, device: str | torch.device = "cpu") -> tuple[Architecture, dict[str, Any]]:
    """Build the detector of a checkpoint, in evaluation mode.

    Also return its metadata: config (dict), network_input, categories, step, epoch, metrics, fingerprint (of
    its shards) and sha256.
    """
    state = read(uri)
    json_files.validate(list[_Category], state.get("categories"), f"categories in {uri}", _CHECKPOINT_FIX)
    config = parsing.from_json(state["config"], where=f"configuration in {uri}")
    detector = build(config.model, len(state["categories"]))
    try:
        detector.load_state_dict(evaluated_weights(state))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {uri} do not fit its configuration: {first_line(error)}",
            fix="use another checkpoint from the same folder",
        ) from None
    keys = ("categories", "step", "epoch", "metrics", "fingerprint")
    meta: dict[str, Any] = {key: state.get(key) for key in keys}
    meta |= {
        "config": asdict(config),
        "network_input": config.loader.network_input,
        "sha256": read_digest(uri),
    }
    return detector.to(device).eval(), meta


def write_weights(uri: str, target: str) -> dict[str, Any]:
    """Write the evaluated weights of a checkpoint in the layout of the architecture's library.

    `target` is a .safetensors file, another file for `torch.load`, or a folder if the library reads
    folders. Return weights (the URI) and num_classes, which the library's model needs.
    """
    detector, meta = load_model(uri)
    upstream = detector.upstream_weights([category["name"] for category in meta["categories"]])
    state = {name: value.contiguous() for name, value in upstream.state.items()}
    for name, content in upstream.files.items():
        storage.write_bytes(storage.join(target, name), content)
    if upstream.files:
        storage.write_bytes(storage.join(target, WEIGHTS), safetensors.torch.save(state, {"format": "pt"}))
    elif target.endswith(".safetensors"):
        storage.write_bytes(target, safetensors.torch.save(state))
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        storage.write_bytes(target, buffer.getvalue())
    return {"weights": target, "num_classes": upstream.num_classes}
