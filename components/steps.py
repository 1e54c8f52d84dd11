"""What the bodies of all components share: running and reporting a step's work, and its small artifacts.

Heavy data never is an artifact: Kubeflow would copy the whole of it into every pod that
reads it. An artifact's file is a small JSON manifest that names the data by its URI.
"""

import errno
import json
import logging
import os
import pkgutil
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from components import hooks, object_store, supervisor
from trainer.base import log
from trainer.base.errors import EXIT_FAILURE, Interrupted, KubedetError, StorageError

TERMINATION_LOG = Path("/dev/termination-log")
"""The content of this file becomes part of the pod's status, and of the workflow's message in Kubeflow."""

_MOST_OF_A_MESSAGE = 4096
"""Bytes that Kubernetes keeps of it."""

_DELETION_SECONDS = 60.0
"""How long a pod waits for the signal that follows its own deletion."""

STARTED = "step started"
"""Text of the log line after which a step's own output begins."""

FINISHED = "step finished"
"""Text of the log line with which a step's own output ends."""


def run(
    step: str, work: str, *arguments: Any, secret: str = "", lasting: bool = False, needed: bool = True
) -> Any:
    """Do the work of a step: its log lines, further tries where they may help, and its end as an exit code.

    A KubedetError becomes its message, without a traceback, and its exit code. The message is the last
    thing in the log; in a pod it is also what Kubernetes shows of the container's end. Where
    `kubedet run` waits, an error goes to the file it follows too, as one JSON object a
    line: {"step", "message", "exit_code", "known" (it is a KubedetError)}. Kubeflow's local
    runner keeps neither the message nor the code. The hooks learn how the step ended.

    Args:
        step: name of the step, e.g. "train".
        work: the function that does it, as "module:name". It is imported in the work's own process: the one
            that waits for it, and would start it again, stays small.
        arguments: what it is called with.
        secret: the Secret with the object store's keys that the run names, for messages where it has none.
        lasting: see `supervisor.run`.
        needed: False for work that the run can do without: a KubedetError is then only logged.

    Returns:
        What the function returns; None after an error of work that is not needed.

    Raises:
        SystemExit: with the exit code of a KubedetError or of a full disk.
    """
    log.setup()
    object_store.set_defaults()
    logger = logging.getLogger(f"kubedet.{step}")
    logger.info(STARTED)
    start = time.monotonic()
    end = partial(hooks.End, step, datetime.now(UTC).isoformat(), arguments)

    def do_work() -> Any:
        from components import usage  # Here: the process that waits stays small.

        try:
            with usage.metered(step):
                return pkgutil.resolve_name(work)(*arguments)
        except KubedetError as error:
            object_store.explain(error, secret)
            raise
        except OSError as error:
            if (explained := _explained(error)) is None:
                raise
            raise explained from None

    try:
        patience, orphaned = supervisor.Patience.here(), partial(_orphaned, step)
        result = supervisor.run(step, do_work, patience, lasting=lasting, orphaned=orphaned)
    except KubedetError as error:
        if not needed:
            logger.warning("%s\n  the run goes on without this pod", error)
            return None
        is_known = not isinstance(error, supervisor.Crashed)
        _write_event(step, str(error), error.exit_code, known=is_known)
        _show_kubernetes(error)
        hooks.at_end(end(error=str(error), is_stopped=isinstance(error, Interrupted)))
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        _write_event(step, _one_line(error), EXIT_FAILURE)
        hooks.at_end(end(error=_one_line(error)))
        raise
    hooks.at_end(end(result=result))
    logger.info("%s, %.1f s", FINISHED, time.monotonic() - start)
    return result


def _orphaned(step: str) -> None:
    """Report that the process that waits for the step's work was killed, and have the step run again.

    Kubeflow would fail the run. It tries a step again only if its pod is deleted, so this pod deletes itself;
    where that is not allowed, the run fails with the message.
    """
    error = supervisor.Killed(
        f"the main process of the step {step} was killed",
        fix="if memory ran out, raise the step's (step_memory); Retry in Kubeflow's UI goes on with this run",
    )
    _show_kubernetes(error)
    print(f"error: {error}", file=sys.stderr, flush=True)
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        from components.launchers.cluster import client, own_pod

        with suppress(KubedetError):
            own_pod.delete(client.connect())
            time.sleep(_DELETION_SECONDS)


def _explained(error: OSError) -> KubedetError | None:
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk is full{where}", fix="free space, then run the same command again")
    return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _show_kubernetes(error: KubedetError) -> None:
    """Write the message into the container's termination log."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with suppress(OSError):
            TERMINATION_LOG.write_text(str(error).encode()[:_MOST_OF_A_MESSAGE].decode(errors="ignore"))


def _write_event(step: str, message: str, exit_code: int, *, known: bool = False) -> None:
    path = os.environ.get(log.PROGRESS_FILE)
    if path:
        event = {"step": step, "message": message, "exit_code": exit_code, "known": known}
        with suppress(OSError), Path(path).open("a") as file:  # The step's own error counts, not this.
            file.write(json.dumps(event) + "\n")


def publish(artifact: Any, manifest: dict[str, Any], metadata: dict[str, Any]) -> None:
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
