"""A program on a terminal of its own, typed at and read like a person does."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

_ESCAPES = re.compile(
    rb"\x1b(\[[0-9;?<>=$]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\)|[PX^_].*?\x1b\\|[()][A-Z0-9]|[=>78])"
)


class Terminal:
    def __init__(self, command, env, size=(40, 120)):
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self._process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            env={**env, "TERM": "xterm-256color"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._heard = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, text):
        """Press keys."""
        os.write(self._ours, text.encode())

    def until(self, text, seconds=60):
        """Wait for a text; returns all that came since the last one, without colors and the like."""
        end = time.monotonic() + seconds
        while text not in (plain := _ESCAPES.sub(b"", self._heard).decode(errors="replace")):
            assert time.monotonic() < end, f"no {text!r} in {plain[-3000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._heard += os.read(self._ours, 65536)
        before, _, rest = plain.partition(text)
        self._heard = rest.encode()
        return before + text

    def end(self, seconds=60):
        """Wait for the program's end; returns its exit code."""
        end = time.monotonic() + seconds
        while self._process.poll() is None:  # What nobody reads may keep it from ending.
            assert time.monotonic() < end, self._heard
            if select.select([self._ours], [], [], 0.05)[0]:
                self._heard += os.read(self._ours, 65536)
        return self._process.returncode

    @property
    def echoes(self):
        """Whether the terminal is in the state in which people want it back."""
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)
