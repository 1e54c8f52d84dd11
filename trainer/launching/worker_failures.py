"""Failures of worker processes: how workers report errors, and which failure caused the others.

A failing worker writes a small JSON file, which torchrun passes to the node's launch process (launch.py).
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base import events
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY, KubedetError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: path of the file in which torchrun expects a worker's error."""
_EXIT_CODE = "exit_code"  # key of our error files: the intended exit code of the process
_LOST_PEER = "lost_peer"
"""Key of our error files: whether the process failed only because another one is gone."""
_LOST_PEER_MESSAGES = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
    "Timed out waiting", "Application timeout", "Gloo connectFullMesh failed", "remote process exited",
)  # fmt: skip
"""Messages of gloo and NCCL about a peer that is gone, or never connected."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that torchrun may take to stop its workers."""


def worker_grace() -> int:
    """Return the seconds after which torchrun kills workers that ignore SIGTERM."""
    return min(30, int(os.environ.get(_SHUTDOWN, "30")))


def node_grace() -> int:
    """Return the seconds that a node without a failure of its own waits, so that the failed node exits first.

    The controller decides by the exit code of the first pod that ends. The failed node must stop its workers
    before it exits, which usually takes one or two seconds.
    """
    return min(worker_grace() + 2, 8)


def report_error(error: KubedetError) -> None:
    """Report an error to torchrun if it runs this process, else to stderr and as an event."""
    if not _write_error_file(str(error), exit_code=error.exit_code):
        if not events.is_file_set():  # The reader of the file shows the error.
            print(f"error: {error}", file=sys.stderr, flush=True)
        events.emit(events.ProcessFailed(message=str(error), exit_code=error.exit_code))


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error only means that another process of the run is gone, or never connected."""
    if ERROR_FILE not in os.environ:
        return False
    import torch.distributed as dist  # Verbs without torch report errors as well.

    gone = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    return gone or any(text in str(error) for text in _LOST_PEER_MESSAGES)


def report_lost_peer(error: Exception) -> None:
    """Report to torchrun that this process fails only because another one is gone."""
    _write_error_file(first_sentence(error), exit_code=EXIT_RETRY, lost_peer=True)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a PyTorch error, without its location in the C++ sources."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[/[^\]]*\]\s*", "", line).partition(". ")[0]


def _write_error_file(message: str, **facts: Any) -> bool:
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    # Format of torch.distributed.elastic.multiprocessing.errors.
    Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time()), **facts}))
    return True


def first_cause(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """Return the rank and failure of the process that caused a node's other failures."""
    began = min(failure.timestamp for failure in failures.values())
    return min(failures.items(), key=lambda item: (_cause_rank(item[1], began), item[1].timestamp))


def _cause_rank(failure: "ProcessFailure", began: int) -> int:
    """Rank a failure: 0 is a cause with a message; higher values are more likely consequences."""
    facts = failure.error_file_data
    if facts.get(_LOST_PEER):
        return 4
    if _EXIT_CODE in facts:
        # A worker that torchrun stopped reports an interruption.
        return 3 if facts[_EXIT_CODE] == EXIT_RETRY else 0
    if failure.exitcode == -signal.SIGTERM:
        return 5
    # A late SIGKILL comes from torchrun. Timestamps are in whole seconds.
    late = max(worker_grace() * 5 / 6, 1.0)
    if failure.exitcode == -signal.SIGKILL and failure.timestamp - began >= late:
        return 5
    # NCCL's watchdog aborts processes that lost a peer.
    return 2 if failure.exitcode == -signal.SIGABRT else 1


def exit_code(failure: "ProcessFailure") -> int:
    """Return the exit code for a failure: 128 + n for signal n, else the code that the process reported."""
    if _EXIT_CODE in failure.error_file_data:
        return int(failure.error_file_data[_EXIT_CODE])
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def is_retryable(failure: "ProcessFailure") -> bool:
    """Return whether a restart may help: the process was killed or stopped, or it lost a peer.

    Codes from 1 to 127 are permanent, as for restartPolicy ExitCode of a PyTorchJob.
    """
    return exit_code(failure) > 127


def caused_by_lost_peer(failure: "ProcessFailure") -> bool:
    """Return whether a process failed only because another node did."""
    return bool(failure.error_file_data.get(_LOST_PEER)) or failure.exitcode == -signal.SIGABRT


def explain(rank: int, failure: "ProcessFailure") -> str:
    """Describe the first failure to the user, with a fix."""
    facts, code = failure.error_file_data, failure.exitcode
    if facts.get(_LOST_PEER):
        return (
            f"stopped: rank {rank} lost another process of this run: {failure.message}\n"
            "  fix: see the error of the failed node; the same command resumes from the last checkpoint"
        )
    if _EXIT_CODE in facts:
        return f"error: {failure.message}"
    process = f"error: the training process of rank {rank}"
    if code < 0:
        how, advice = f"died from {signal.Signals(-code).name}", "check the log above"
        if code == -signal.SIGKILL:
            how = "was killed (SIGKILL)"
            advice = "probably out of memory: lower train.batch_size or loader.image_size, or add memory"
        return (
            f"{process} {how}; all others were stopped\n"
            f"  fix: {advice}; the same command resumes from the last checkpoint"
        )
    if code == EXIT_FAILURE:
        return f"{process} failed; see the traceback above"
    return f"{process} failed with exit code {code}; see the log above"
