"""Runs a command so that nothing it starts outlives the caller. Standard library only.

    python -I guard.py LIFELINE GRACE COMMAND [ARGUMENT ...]

LIFELINE is the number of an inherited pipe whose other end only the caller holds: when the
caller is gone, however it went, the pipe ends and the command is stopped. (A parent-death
signal would need code between fork and exec, and would reach the direct child alone, while
torchrun's workers are in sessions of their own.) The guard is a "child subreaper": whatever
loses its parent becomes the guard's child, so that it finds every descendant.

Stopping is SIGTERM to the command, GRACE seconds to end by itself, then SIGKILL to all that
is left; a second SIGTERM to the guard ends the patience. A process whose parent died while
the command goes on (a worker of a killed pool) is ended too: it would keep pipes open.

The exit code is the command's, 128 + n where signal n ended it.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # Seconds between two scans of /proc, which take time on a machine with many processes.
_ORPHAN_SECONDS = 2.0


class Guard:
    """One command and all that descends from it."""

    def __init__(self, lifeline: int, grace: float, command: list[str]) -> None:
        self._lifeline, self._grace = lifeline, grace
        self._stops = 0
        self._deadline = float("inf")
        self._code: int | None = None
        self._orphans: dict[int, float] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # A group of its own: the command may signal its whole group and not mean the guard.
        self._pid = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL).pid

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stops += 1
        if self._stops == 1:
            self._deadline = time.monotonic() + self._grace
            if self._code is None:
                _signal(self._pid, signal.SIGTERM)
        else:
            self._deadline = 0.0

    def run(self) -> int:
        """Wait for the command and for everything it started; return its exit code."""
        watched = [self._lifeline]
        next_look = 0.0
        while True:
            if select.select(watched, [], [], _POLL_SECONDS)[0]:
                watched = []  # It ended: reading on would spin.
                self._stop()
            childless = self._reap()
            if childless and self._code is not None:
                return self._code
            now = time.monotonic()
            if now > self._deadline:
                for pid in _descendants(_children(), os.getpid()):
                    _signal(pid, signal.SIGKILL)
            elif now > next_look:
                next_look = now + _LOOK_SECONDS
                children = _children().get(os.getpid(), [])
                self._end_orphans([pid for pid in children if pid != self._pid])

    def _reap(self) -> bool:
        """Take the exit codes of children that ended; return whether none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code

    def _end_orphans(self, pids: list[int]) -> None:
        """Give an orphan a moment to end by itself, then SIGTERM and, after the grace period, SIGKILL."""
        now = time.monotonic()
        self._orphans = {pid: self._orphans.get(pid, now) for pid in pids}
        for pid, since in self._orphans.items():
            if now - since > _ORPHAN_SECONDS + min(self._grace, 10.0):
                _signal(pid, signal.SIGKILL)
            elif now - since > _ORPHAN_SECONDS:
                _signal(pid, signal.SIGTERM)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children() -> dict[int, list[int]]:
    """Return every process's children, read from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # pid (name, which may hold anything) state ppid ...
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # It ended while we looked.
            children.setdefault(parent, []).append(int(name))
    return children


def _descendants(children: dict[int, list[int]], pid: int) -> list[int]:
    descendants = []
    for child in children.get(pid, []):
        descendants += [child, *_descendants(children, child)]
    return descendants


def main() -> int:
    """Read the arguments and run."""
    lifeline, grace, *command = sys.argv[1:]
    try:
        guard = Guard(int(lifeline), float(grace), command)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return guard.run()


if __name__ == "__main__":
    # Without the interpreter's clean-up: subprocess would warn of a child we reaped ourselves.
    code = main()
    sys.stdout.flush()
    os._exit(code)
