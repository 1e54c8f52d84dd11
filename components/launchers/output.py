"""Finds messages in the output of a training run: its error, and hints on wrong settings."""

import re
from collections.abc import Iterable

from trainer.base import events
from trainer.base.errors import LaunchError

LAST_LINES = 20  # Number of log lines in the error of a training run that ended without a message.


def failure_message(lines: Iterable[str]) -> str:
    """Return the message of the last failure event in a log; empty if there is none."""
    failures = [event for event in events.parse_lines(lines) if isinstance(event, events.ProcessFailed)]
    return failures[-1].message if failures else ""


def indent_lines(lines: Iterable[str]) -> str:
    """Indent the lines, without machine-readable events, as a block below an error."""
    return "\n".join(f"  {line}" for line in lines if not events.parse(line))


# Patterns of log lines and their hints: for every job, for jobs in pods, and for jobs that request RDMA.
_GENERAL_HINTS = {
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: (CUDA|HIP)": "the GPU's memory is full: "
    "halve train.batch_size and set train.global_batch, which keeps the images of a step; "
    "PYTORCH_ALLOC_CONF=expandable_segments:True (the default with GPUs) avoids fragmentation",
    r"Watchdog caught collective operation timeout": "one rank waited too long for the others: another "
    "rank is stuck, gone or much slower; look at the last lines of each (`kubedet job logs --rank`) and at "
    "the network (network.interface)",
}
_POD_HINTS = {
    r"ibv_reg_mr\w* failed|ibv_create_\w+ failed.*Cannot allocate memory": "RDMA memory cannot be locked: "
    "allow unlimited memlock on the nodes (LimitMEMLOCK of the container runtime; deploy/ has the files) and "
    "the capability IPC_LOCK (network.profile rdma adds it)",
    r"[Bb]us error|unable to mmap|exit code:? 135|exitcode\s*:\s*-7|No space left on device.*/dev/shm"
    r"|Error while creating shared memory segment": "shared memory (/dev/shm) is too small: set "
    "shared_memory higher, which counts towards memory_limit",
    r"PermissionError: \[Errno 13\]": "the pods' user has no access: set fs_group to the group that owns the "
    "volume, or run_as_user to the user that owns the folder",
}
_RDMA_HINTS = {
    r"NET/Socket": "RDMA was requested, but NCCL uses TCP (NET/Socket): give the pods the RDMA resource and "
    "its network (resources, annotations), the capability IPC_LOCK and unlimited memlock, and check "
    "network.hca; network.debug INFO shows the reason"
}
_BUS_ERROR = 135  # 128 + SIGBUS


class Hints:
    """Collects hints from log lines, each once; hints on RDMA or pods only if the job uses them."""

    def __init__(self, *, rdma: bool, pods: bool = True) -> None:
        self._rules = _GENERAL_HINTS | (_POD_HINTS if pods else {}) | (_RDMA_HINTS if rdma else {})
        self.hints: list[str] = []  # The hints so far.

    def find_new(self, text: str) -> str:
        """Match a log line; return its hint if it is new, otherwise an empty string."""
        for pattern, hint in self._rules.items():
            if hint not in self.hints and re.search(pattern, text):
                self.hints.append(hint)
                return hint
        return ""

    def make_error(self, message: str, fix: str, code: int | None) -> LaunchError:
        """Return the error of a training run with all hints, and its exit code if below 128."""
        if code == _BUS_ERROR:
            self.find_new("Bus error")
        error = LaunchError(message, fix="\n  ".join(filter(None, [*self.hints, fix])))
        error.exit_code = code if code and code < 128 else LaunchError.exit_code
        return error
