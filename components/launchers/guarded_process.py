"""A child process under a guard: its output line by line, and no orphans."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from components.launchers import guard


class GuardedProcess:
    """A command that is stopped, with all it started, when this process ends in any way.

    Its stdout and stderr come as one stream of lines, unless they are to go elsewhere. Use it as
    a context manager: leaving the block stops what still runs and waits for it.
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
        """Start it.

        Args:
            command: program and arguments; no shell is between.
            env: the whole environment; None is this process's.
            cwd: the folder in which it starts; None is this process's.
            grace_seconds: how long it may take to end when asked to, before it is killed.
            keep_open: file descriptors the guard holds until all is over (a lock).
            stdout: where it goes, as subprocess.Popen takes it; None is this process's.
            stderr: as stdout.
        """
        lifeline, self._lifeline = os.pipe()
        script = str(Path(guard.__file__))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", script, str(lifeline), str(grace_seconds), *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                pass_fds=(lifeline, *keep_open),
                # Out of the terminal's foreground group: Ctrl-C reaches it through `stop` alone.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)

    def lines(self) -> Iterator[str]:
        """Yield each line of output, without its end, until the last process has ended."""
        for line in self._process.stdout or ():
            yield line.decode(errors="replace").rstrip("\r\n")

    def stop(self) -> None:
        """Stop it; a second call kills it."""
        self._process.terminate()

    def poll(self) -> int | None:
        """Return what `wait` does where it has ended; None while it runs."""
        return None if self._process.poll() is None else self.wait()

    def wait(self) -> int:
        """Return its exit code when it has ended: 128 + n where signal n ended it."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def __enter__(self) -> "GuardedProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lifeline)  # The guard takes it for our end, and stops what still runs.
        for _ in self.lines():
            pass  # Until the end: a process that cannot write its last lines may fail to save.
        self._process.wait()
