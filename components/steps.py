"""Runs and reports the work of a step, and reads and writes its small artifacts.

Kubeflow copies artifacts into every pod that reads them, so an artifact's file is only a small JSON manifest
with the URI of the data.
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

from components import environment, hooks, supervisor
from trainer.base import log
from trainer.base.errors import EXIT_FAILURE, Interrupted, KubedetError, StorageError

TERMINATION_LOG = Path("/dev/termination-log")
"""The content of this file becomes part of the pod's status, and of the workflow's message in Kubeflow."""

STARTED, FINISHED = "step started", "step finished"
"""Texts of the log lines before and after a step's own output."""

_MESSAGE_BYTES = 4096  # Kubernetes keeps no more.
_DELETION_SECONDS = 60.0  # Until the signal that follows the pod's own deletion.


def run(
    step: str, work: str, *arguments: Any, secret: str = "", lasting: bool = False, needed: bool = True
) -> Any:
    """Run the work of a step: log lines, retries, hooks, and an exit code at its end.

    The message of a KubedetError is the end of the log, without a traceback; in a pod it is also the pod's
    termination message. For `kubedet run` an error is also appended to the file that it follows, as one JSON
    object a line: Kubeflow's local runner keeps neither message nor code.

    Args:
        step: name of the step, e.g. "train".
        work: the function that does it, as "module:name", imported in the work's own process: the waiting
            process stays small.
        arguments: of that function.
        secret: name of the Secret with the object store's keys, for messages if it is missing.
        lasting: see `supervisor.run`.
        needed: False for work that the run can do without: a KubedetError is then only logged.

    Returns:
        What the function returns; None after an error of work that is not needed.
    """
    log.setup()
    environment.set_defaults()
    logger = logging.getLogger(f"kubedet.{step}")
    logger.info(STARTED)
    start = time.monotonic()
    end = partial(hooks.End, step, datetime.now(UTC).isoformat(), arguments)

    def do_work() -> Any:
        from components import usage  # Here: the waiting process stays small.

        try:
            with usage.metered(step):
                return pkgutil.resolve_name(work)(*arguments)
        except KubedetError as error:
            environment.explain(error, secret)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f" at {error.filename}" if error.filename else ""
            fix = "free space, then run the same command again"
            raise StorageError(f"the disk is full{where}", fix=fix) from None

    def report_end(message: str, exit_code: int, *, known: bool, **ending: Any) -> None:
        if path := os.environ.get(log.PROGRESS_FILE):
            event = {"step": step, "message": message, "exit_code": exit_code, "known": known}
            with suppress(OSError), Path(path).open("a") as file:  # The step's own error matters more.
                file.write(json.dumps(event) + "\n")
        hooks.at_end(end(error=message, **ending))

    try:
        patience, orphaned = supervisor.Patience.here(), partial(_orphaned, step)
        result = supervisor.run(step, do_work, patience, lasting=lasting, orphaned=orphaned)
    except KubedetError as error:
        if not needed:
            logger.warning("%s\n  the run goes on without this pod", error)
            return None
        is_known, is_stopped = not isinstance(error, supervisor.Crashed), isinstance(error, Interrupted)
        report_end(str(error), error.exit_code, known=is_known, is_stopped=is_stopped)
        _report(error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        report_end(text, EXIT_FAILURE, known=False)
        raise
    hooks.at_end(end(result=result))
    logger.info("%s, %.1f s", FINISHED, time.monotonic() - start)
    return result


def _orphaned(step: str) -> None:
    """Report that the waiting process was killed, and have the step run again.

    Kubeflow runs a step again only if its pod is deleted, so this pod deletes itself if it may.
    """
    _report(
        supervisor.Killed(
            f"the main process of the step {step} was killed",
            fix="if memory ran out, raise the step's (step_memory); Retry in Kubeflow continues the run",
        )
    )
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        from components.launchers.cluster import client, own_pod

        with suppress(KubedetError):
            own_pod.delete(client.connect())
            time.sleep(_DELETION_SECONDS)


def _report(error: KubedetError) -> None:
    """Print an error, and write it to the pod's status."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with suppress(OSError):
            TERMINATION_LOG.write_text(str(error).encode()[:_MESSAGE_BYTES].decode(errors="ignore"))
    print(f"error: {error}", file=sys.stderr, flush=True)


def publish(artifact: Any, manifest: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a small JSON manifest as an output artifact's file, and show `metadata` with it in the UI."""
    Path(artifact.path).write_text(json.dumps(manifest, indent=2) + "\n")
    artifact.metadata.update(metadata)


def manifest(artifact: Any) -> dict[str, Any]:
    """Read the manifest that `publish` wrote, from an input artifact."""
    return json.loads(Path(artifact.path).read_text())
