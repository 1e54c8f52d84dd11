"""What the bodies of all components share: how a step reports, and its small artifacts.

Heavy data never is an artifact: Kubeflow would copy the whole of it into every pod that
reads it. An artifact's file is a small JSON manifest that names the data by its URI.
"""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from components import stores
from trainer import log, storage
from trainer.errors import EXIT_FAILURE, KubedetError, StorageError

STARTED = "step started"
"""Text of the log line after which a step's own output begins."""

FINISHED = "step finished"
"""Text of the log line with which a step's own output ends."""


@contextmanager
def reported(step: str) -> Iterator[None]:
    """Run the body of a step: its log lines, and its end as an exit code.

    A KubedetError becomes its message, without a traceback, and its exit code. Where
    `kubedet run` waits, an error goes to the file it follows too, as one JSON object a
    line: {"step", "message", "exit_code", "known" (it is a KubedetError)}. Kubeflow's local
    runner keeps neither the message nor the code.

    Args:
        step: name of the step, e.g. "download".

    Raises:
        SystemExit: with the exit code of a KubedetError or of a full disk.
    """
    log.setup()
    stores.set_defaults()
    logger = logging.getLogger(f"kubedet.{step}")
    logger.info(STARTED)
    start = time.monotonic()
    try:
        yield
    except Exception as error:
        known = _known(error)
        if known is None:
            _tell(step, _one_line(error), EXIT_FAILURE)
            raise
        _tell(step, str(known), known.exit_code, known=True)
        print(f"error: {known}", file=sys.stderr, flush=True)
        raise SystemExit(known.exit_code) from None
    logger.info("%s, %.1f s", FINISHED, time.monotonic() - start)


def _known(error: Exception) -> KubedetError | None:
    if isinstance(error, KubedetError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        return StorageError(f"the disk is full{where}", fix="free space, then run the same command again")
    return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _tell(step: str, message: str, exit_code: int, *, known: bool = False) -> None:
    path = os.environ.get(log.PROGRESS_FILE)
    if path:
        event = {"step": step, "message": message, "exit_code": exit_code, "known": known}
        with suppress(OSError), Path(path).open("a") as file:  # The step's own error counts, not this.
            file.write(json.dumps(event) + "\n")


def publish(artifact: Any, manifest: dict[str, Any], **metadata: Any) -> None:
    """Write a manifest as an artifact's file and show `metadata` with it in the UI.

    Args:
        artifact: an output artifact of kfp (has `path` and `metadata`).
        manifest: JSON object; small, as every reader of the artifact downloads it.
        metadata: strings and numbers that a person wants to see.
    """
    Path(artifact.path).write_text(json.dumps(manifest, indent=2) + "\n")
    artifact.metadata.update(metadata)


def manifest(artifact: Any) -> dict[str, Any]:
    """Read the manifest that `publish` wrote into an input artifact of kfp."""
    return json.loads(Path(artifact.path).read_text())


def publish_file(artifact: Any, uri: str) -> None:
    """Make a copy of the file at a URI the content of an output artifact (a report)."""
    Path(artifact.path).write_bytes(storage.read_bytes(uri))
