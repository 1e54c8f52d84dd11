"""Events of the OpenLineage standard: a server that is configured learns what each step read and wrote.

https://openlineage.io. The variables are those of its client for Python; in a cluster steps have them from a
Secret. Address and key stand in no log, specification or artifact. Telling never is a reason for a step to
fail: another process does it (`components.lineage_sender`). So the one that waits for the step's work imports
nothing for it, and whatever hangs, looking up a name included, ends in time.
"""

import json
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from components import run_ids
from trainer import storage
from trainer.base.masking import masked

logger = logging.getLogger(__name__)

SECRET = "kubedet-openlineage"  # noqa: S105 (its name)
"""Name of the Secret in the namespace of the runs. It need not exist: then nobody is told."""

URL, API_KEY, ENDPOINT, NAMESPACE, DISABLED = (
    f"OPENLINEAGE_{name}" for name in ("URL", "API_KEY", "ENDPOINT", "NAMESPACE", "DISABLED")
)

SECRET_KEYS = {"url": URL, "api_key": API_KEY, "endpoint": ENDPOINT, "namespace": NAMESPACE}
"""Keys of the Secret, of which `url` is required, and the variables they become."""

START, COMPLETE, FAIL, ABORT = "START", "COMPLETE", "FAIL", "ABORT"

_PATIENCE = 10.0
"""Seconds that the process gets which tells of the end; mostly it gives up by itself before."""
_LEFT = 1.0
"""Seconds that the one gets which told of the beginning, and then still goes on."""
_MOST_OF_AN_ERROR = 3000
_MOST_TAGS = 40
_PLACES = ("coco", "voc", "yolo")
"""Kinds of sources that are followed by a place."""


@dataclass(frozen=True)
class Dataset:
    """Something that a step reads or writes."""

    namespace: str
    name: str
    version: str = ""
    """Fingerprint, or what tells one content from another."""
    type: str = "FILE"
    """FILE or MODEL."""
    images: int | None = None
    boxes: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, bool] = field(default_factory=dict)
    """Rules that it was held to, and whether it kept them."""


class Work(NamedTuple):
    """What a step's work is about."""

    data_root: str
    inputs: list[Dataset]
    outputs: list[Dataset]
    """Empty where the work has not been done, or there was nothing to do."""


def at(uri: str, **known: Any) -> list[Dataset]:
    """Return what lies behind a URI, in the standard's names for it; nothing where there is no URI.

    (https://openlineage.io/docs/spec/naming)
    """
    if not uri:
        return []
    if storage.is_local(uri):
        return [Dataset("file", storage.absolute(os.path.expanduser(uri)), **known)]
    # Without a query, which may hold a signature, and without a name and a password.
    authority, _, path = masked(uri).partition("?")[0].partition("://")[2].partition("/")
    return [
        Dataset(f"{storage.scheme(uri)}://{authority.rpartition('@')[2]}", path.strip("/") or "/", **known)
    ]


def _source(source: str, version: str) -> list[Dataset]:
    kind, _, rest = source.strip().partition(":")
    if kind in _PLACES and rest.partition(",")[0].strip() != "2017":
        return at(rest, version=version)
    if kind in ("sample", "openimages", "coco"):
        return [Dataset(kind, masked(rest) or kind, version)]
    return at(source.strip(), version=version)


def _raw(manifest: dict[str, Any]) -> list[Dataset]:
    splits = manifest.get("splits", {}).values()
    counts = (
        {key: sum(split.get(key, 0) for split in splits) for key in ("images", "boxes")} if splits else {}
    )
    return at(manifest["uri"], version=manifest.get("content") or manifest["fingerprint"], **counts)


def _shards(manifest: dict[str, Any]) -> list[Dataset]:
    counts = {
        name: sum(count for key, count in manifest.items() if key.endswith(suffix))
        for name, suffix in (("images", "_samples"), ("boxes", "_boxes"))
    }
    return at(manifest["uri"], version=manifest["fingerprint"], **counts)


def _checkpoint(trained: dict[str, Any], **known: Any) -> list[Dataset]:
    step = trained.get("best_step")
    version = "" if step is None else f"step {step}"
    return at(trained["checkpoint"], version=version, type="MODEL", **known)


def _prepare(
    result: Any, source: str, recipe: str, overrides: Any, data_root: str, version: str, *rest: Any
) -> Work:
    (raw, _), (shards, _) = result or (({"uri": "", "fingerprint": ""}, {}),) * 2
    return Work(data_root, _source(source, version), [*_raw(raw), *_shards(shards)])


def _train(result: Any, data: dict[str, Any], output: str, data_root: str, *rest: Any) -> Work:
    outputs = [*_checkpoint(result[0]), *at(result[0]["config"])] if result else []
    return Work(data_root, _shards(data), outputs)


def _evaluate(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    data_root = storage.parent(storage.parent(trained["shards"]))
    if not result:
        return Work(data_root, _checkpoint(trained) + at(trained["shards"]), [])
    verdict, shown = result["verdict"], list(result["shown"].items())[:_MOST_TAGS]
    inputs = _checkpoint(trained, checks={verdict["rules"]: verdict["verdict"] == "pass"})
    tags = {name: f"{value:.6g}" for name, value in shown}
    outputs = at(storage.join(trained["output"], "evaluation"), tags=tags)
    return Work(data_root, inputs + at(trained["shards"]), outputs)


def _export(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    inputs = _checkpoint(trained) + at(storage.join(trained["output"], "evaluation"))
    outputs = at(result["model"], version=result["model_version"], type="MODEL") if result else []
    return Work(storage.parent(storage.parent(trained["shards"])), inputs, outputs)


STEPS: dict[str, Callable[..., Work]] = {
    "prepare": _prepare, "train": _train, "evaluate": _evaluate, "export": _export,
}  # fmt: skip
"""The steps that are told of, each with what describes its work: from its result, None before there is one,
and the arguments that its work is called with."""


class Telling:
    """Tells of one step: that it began, and how it ended. Raises nothing.

    Args:
        step: its name.
        arguments: what its work is called with.
    """

    def __init__(self, step: str, arguments: tuple[Any, ...]) -> None:
        self._step, self._arguments = step, arguments
        self._describe = STEPS.get(step)
        self._told: list[subprocess.Popen[str]] = []
        self._problem = ""
        if not os.environ.get(URL, "").strip() or os.environ.get(DISABLED, "").strip().lower() == "true":
            self._describe = None
        self._run = str(uuid.uuid4())
        self._tell(START, None)

    def completed(self, result: Any) -> None:
        """Tell that it ended well, with what its work returned."""
        self._end(COMPLETE, result)

    def failed(self, message: str, *, stopped: bool = False) -> None:
        """Tell that it failed, or was asked to end, and why."""
        self._end(ABORT if stopped else FAIL, None, masked(message)[:_MOST_OF_AN_ERROR])

    def _end(self, event_type: str, result: Any, error: str = "") -> None:
        self._tell(event_type, result, error)
        for process, patience in zip(reversed(self._told), (_PATIENCE, _LEFT), strict=False):
            self._problem = _outcome(process, patience) or self._problem
        if self._problem:
            logger.warning("OpenLineage's server was not told of this step: %s", self._problem)

    def _tell(self, event_type: str, result: Any, error: str = "") -> None:
        if self._describe is None:
            return
        try:
            work = self._describe(result, *self._arguments)
            event = self._event(work) | {"type": event_type, "error": error}
            self._told.append(_send(json.dumps(event)))
        except Exception as problem:  # Whatever it is, the step goes on; its text may hold the address.
            self._problem = type(problem).__name__

    def _event(self, work: Work) -> dict[str, Any]:
        name = run_ids.current()
        parent = run_of(name, work.data_root) if name else None
        return {
            "step": self._step,
            # The same for each attempt: the next one goes on with what this one began.
            "run": str(uuid.uuid5(parent, self._step)) if parent else self._run,
            "parent": str(parent or ""),
            "name": name,
            "time": datetime.now(UTC).isoformat(),
            "inputs": [asdict(each) for each in work.inputs],
            "outputs": [asdict(each) for each in work.outputs],
        }


def run_of(name: str, data_root: str) -> uuid.UUID:
    """Return the standard's id of a run: its own where that is a UUID, as in a cluster.

    Args:
        name: the run's id, or its name on one machine.
        data_root: URI under which its data are kept.
    """
    with suppress(ValueError):
        return uuid.UUID(name)
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{storage.absolute(data_root)}#{name}")


def _send(event: str) -> "subprocess.Popen[str]":
    """Start the process that sends an event. A session of its own: what ends the step does not end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "components.lineage_sender"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(event)
        process.stdin.close()
    process.stdin = None
    return process


def _outcome(process: "subprocess.Popen[str]", patience: float) -> str:
    """Wait until an event is sent, or for some seconds; returns what went wrong, or nothing."""
    try:
        problem = process.communicate(timeout=patience)[0].strip()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "it took too long"
    return problem or (f"exit code {process.returncode}" if process.returncode else "")
