"""Failures of worker processes: how a worker reports its error, and which failure caused the others.

A worker that fails writes a small JSON file that torchrun hands to the node's launcher
(see launch.py). Most failures only follow from another: a process whose peer is gone, or
one that torchrun stopped because its neighbour failed.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY, KubedetError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: path of the file to which torchrun expects each worker to write its error."""
_EXIT_CODE = "exit_code"
"""Key of an error file that we wrote: the exit code of the process, unless it is killed before."""
_LOST_PEER = "lost_peer"
"""Key of an error file: whether the process failed only because a peer is gone."""
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "Gloo connectFullMesh failed",
    "remote process exited",
)
"""Messages of gloo and NCCL when a peer is gone, or never came."""
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with which a launcher tells how long torchrun may take to stop its workers."""


def neighbours_patience() -> int:
    """Seconds after which torchrun kills workers that ignore its SIGTERM, when another worker has failed.

    A worker whose neighbour is gone has nothing to save.
    """
    return min(30, int(os.environ.get(_SHUTDOWN, "30")))


def peers_patience() -> int:
    """Seconds that a node which only lost a peer waits before it ends, so that the failed node ends first.

    The controller decides by the exit code of the first pod that ends. The failed node has to stop its own
    workers first, which takes `neighbours_patience` seconds at most, mostly one or two.
    """
    return min(neighbours_patience() + 2, 8)


def report_error(error: KubedetError) -> None:
    """Tell the user of an error: through torchrun where it runs this process, else on stderr."""
    if not _write(str(error), exit_code=error.exit_code):
        print(f"error: {error}", file=sys.stderr, flush=True)


def lost_peer(error: Exception) -> bool:
    """Whether an error only says that another process of the run is gone, or never came."""
    if ERROR_FILE not in os.environ:
        return False
    import torch.distributed as dist  # Not above: the verbs that use no torch report errors as well.

    gone = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    return gone or any(text in str(error) for text in _PEER_GONE)


def report_lost_peer(error: Exception) -> None:
    """Tell torchrun that this process fails only because another one is gone."""
    _write(reason(error), exit_code=EXIT_RETRY, lost_peer=True)


def reason(error: BaseException) -> str:
    """The first sentence of an error of PyTorch's, without the place in its sources."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[/[^\]]*\]\s*", "", line).partition(". ")[0]


def _write(message: str, **facts: Any) -> bool:
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    # The form that torchrun reads (torch.distributed.elastic.multiprocessing.errors).
    Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time()), **facts}))
    return True


def first_cause(failures: "dict[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """Return rank and failure of the process whose failure caused the others.

    Args:
        failures: of one node, by rank; at least one.
    """
    began = min(failure.timestamp for failure in failures.values())
    return min(failures.items(), key=lambda item: (_symptom(item[1], began), item[1].timestamp))


def _symptom(failure: "ProcessFailure", began: int) -> int:
    """Rank a failure: 0 is a cause with a message of its own, higher values are likelier consequences."""
    facts = failure.error_file_data
    if facts.get(_LOST_PEER):
        return 4
    if _EXIT_CODE in facts:
        # A worker that torchrun stops says that it was interrupted, like one that a user stops.
        return 3 if facts[_EXIT_CODE] == EXIT_RETRY else 0
    if failure.exitcode == -signal.SIGTERM:
        return 5
    # SIGKILL as late as this is torchrun's own. The timestamps are whole seconds.
    late = max(neighbours_patience() * 5 / 6, 1.0)
    if failure.exitcode == -signal.SIGKILL and failure.timestamp - began >= late:
        return 5
    return 2 if failure.exitcode == -signal.SIGABRT else 1  # NCCL's watchdog aborts what lost a peer.


def exit_code(failure: "ProcessFailure") -> int:
    """What the node ends with: 128 + n for signal n, else what the process said or returned."""
    if _EXIT_CODE in failure.error_file_data:
        return int(failure.error_file_data[_EXIT_CODE])
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def may_pass(failure: "ProcessFailure") -> bool:
    """Whether a restart may help: the process was killed, stopped, or lost a peer.

    The rule of restartPolicy ExitCode of a PyTorchJob: codes from 1 to 127 are permanent.
    """
    return exit_code(failure) > 127


def only_lost_peer(failure: "ProcessFailure") -> bool:
    """Whether this node's first failure was caused by another node."""
    # NCCL's watchdog aborts what lost a peer.
    return bool(failure.error_file_data.get(_LOST_PEER)) or failure.exitcode == -signal.SIGABRT


def explain(rank: int, failure: "ProcessFailure") -> str:
    """The message for the user about the first failure."""
    facts, code = failure.error_file_data, failure.exitcode
    if facts.get(_LOST_PEER):
        return (
            f"stopped: rank {rank} lost another process of this run: {failure.message}\n"
            "  fix: the node that is gone tells why; the same command goes on from the last checkpoint"
        )
    if _EXIT_CODE in facts:
        return f"error: {failure.message}"
    if code == -signal.SIGKILL:
        return (
            f"error: the training process of rank {rank} was killed (SIGKILL); all others were stopped\n"
            "  fix: mostly memory ran out: lower train.batch_size or loader.image_size, or give more memory; "
            "the same command goes on from the last checkpoint"
        )
    if code < 0:
        return (
            f"error: the training process of rank {rank} died of {signal.Signals(-code).name}; "
            "all others were stopped\n"
            "  fix: look at the lines above; the same command goes on from the last checkpoint"
        )
    if code == EXIT_FAILURE:
        return f"error: the training process of rank {rank} failed; the traceback above says where"
    return f"error: the training process of rank {rank} failed with exit code {code}; see the lines above"
