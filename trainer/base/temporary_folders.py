"""Temporary files and folders. If a process is killed, a later one removes its leftovers."""

import hashlib
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = "kubedet-tmp-"
_OWNER = re.compile(r"[.-](\d+)-([0-9a-f]{8})-\w+(\.tmp)?$")


class TemporaryFolder:
    """A folder that is removed by `close`, with this object, or at the end of the process."""

    def __init__(self) -> None:
        """Create it, after removing folders of killed processes."""
        _sweep(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{_machine()}-"))
        self.close = weakref.finalize(self, _remove, self.path, os.getpid())
        """Remove it now."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed when the block ends."""
    folder = TemporaryFolder()
    try:
        yield folder.path
    finally:
        folder.close()


def temporary_suffix() -> str:
    """Return the end of a temporary file's name, which identifies this process."""
    return f".{os.getpid()}-{_machine()}-{secrets.token_hex(4)}.tmp"


def is_left_over(name: str) -> bool:
    """Return whether a name is that of a temporary file or folder of an ended process on this machine."""
    owner = _OWNER.search(name)
    return owner is not None and owner[2] == _machine() and not os.path.exists(f"/proc/{owner[1]}")


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # Not in a forked child.
        shutil.rmtree(path, ignore_errors=True)


@cache
def _sweep(system_folder: str) -> None:
    with suppress(OSError), os.scandir(system_folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and is_left_over(entry.name):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        shutil.rmtree(entry.path, ignore_errors=True)


@cache
def _machine() -> str:
    """Return an id of this boot and container, within which process ids are unique."""
    try:
        parts = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"  # It matches no name: files stay.
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
