"""Runs a command so that nothing it starts outlives the caller. Standard library only.

`GuardedProcess` starts this file as a program, the guard, which starts the command:

    python -I guarded_process.py LIFELINE GRACE COMMAND [ARGUMENT ...]

LIFELINE is the file descriptor of a pipe whose other end the caller holds. When the caller ends, the pipe
closes, and the guard stops the command: SIGTERM, a grace period of GRACE seconds (a second SIGTERM ends it),
then SIGKILL for all remaining processes. The guard is a "child subreaper": orphans become its children, and
it ends them, because they would keep pipes open. The exit code is the command's, or 128 + n after signal n.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.1
_SCAN_SECONDS = 1.0  # Seconds between two scans of /proc, which take time on a machine with many processes.
_ORPHAN_SECONDS = 2.0


class GuardedProcess:
    """Runs a command that is stopped, with its child processes, when this process ends in any way.

    A context manager: leaving the block stops the command and waits for its end. `env` is the complete
    environment and `cwd` the working directory (None: those of this process). A stopped command is killed
    after `grace_seconds`. The guard keeps the files `keep_open` open until all processes have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        grace_seconds: float = 60.0,
        keep_open: Sequence[int] = (),
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.STDOUT,
    ) -> None:
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(lifeline), str(grace_seconds), *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                pass_fds=(lifeline, *keep_open),
                # Outside the terminal's foreground group, so that Ctrl-C reaches it only through `stop`.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)

    def lines(self) -> Iterator[str]:
        """Yield each line of output, without its end, until the last process has ended."""
        for line in self._process.stdout or ():
            yield line.decode(errors="replace").rstrip("\r\n")

    def stop(self) -> None:
        """Stop the command; a second call kills it."""
        self._process.terminate()

    def poll(self) -> int | None:
        """Return the exit code if the command has ended; None while it runs."""
        return None if self._process.poll() is None else self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code, 128 + n after signal n."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def __enter__(self) -> "GuardedProcess":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lifeline)  # The guard then stops all processes, as if this process had ended.
        for _ in self.lines():
            pass  # Read to the end: a process that cannot write its output may fail to save.
        self._process.wait()


class _Guard:
    """A command and its descendants."""

    def __init__(self, lifeline: int, grace: float, command: list[str]) -> None:
        self._lifeline, self._grace = lifeline, grace
        self._stops = 0
        self._deadline = float("inf")
        self._code: int | None = None
        self._orphans: dict[int, float] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        # A separate process group: the command may signal its group, which must not reach the guard.
        self._pid = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL).pid

    def _stop(self, *_: object) -> None:
        self._stops += 1
        if self._stops == 1:
            self._deadline = time.monotonic() + self._grace
            if self._code is None:
                _send_signal(self._pid, signal.SIGTERM)
        else:
            self._deadline = 0.0

    def run(self) -> int:
        watched = [self._lifeline]
        next_scan = 0.0
        while True:
            if select.select(watched, [], [], _POLL_SECONDS)[0]:
                watched = []  # End of the pipe: polling it again would spin.
                self._stop()
            if self._reap() and self._code is not None:
                return self._code
            now = time.monotonic()
            if now > self._deadline:
                for pid in _find_descendants(_list_children(), os.getpid()):
                    _send_signal(pid, signal.SIGKILL)
            elif now > next_scan:
                next_scan = now + _SCAN_SECONDS
                # An orphan gets a moment to end, then SIGTERM and, after the grace period, SIGKILL.
                pids = [pid for pid in _list_children().get(os.getpid(), []) if pid != self._pid]
                self._orphans = {pid: self._orphans.get(pid, now) for pid in pids}
                for pid, since in self._orphans.items():
                    if now - since > _ORPHAN_SECONDS + min(self._grace, 10.0):
                        _send_signal(pid, signal.SIGKILL)
                    elif now - since > _ORPHAN_SECONDS:
                        _send_signal(pid, signal.SIGTERM)

    def _reap(self) -> bool:
        """Reap children that have ended; return whether none is left."""
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


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _list_children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # pid (name, which may hold anything) state ppid ...
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # It ended in the meantime.
            children.setdefault(parent, []).append(int(name))
    return children


def _find_descendants(children: dict[int, list[int]], pid: int) -> list[int]:
    descendants = []
    for child in children.get(pid, []):
        descendants += [child, *_find_descendants(children, child)]
    return descendants


if __name__ == "__main__":
    lifeline, grace, *command = sys.argv[1:]
    try:
        guard = _Guard(int(lifeline), float(grace), command)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    # Without the interpreter's clean-up: subprocess would warn about a child that was reaped here.
    os._exit(guard.run())
