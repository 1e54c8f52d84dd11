"""Temporary files and folders. A new process removes the leftovers of killed ones."""

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
    """A folder that is removed when `close` is called, this object is collected or the process ends."""

    def __init__(self) -> None:
        """Remove the folders of killed processes, and create a new one."""
        _remove_left_overs(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{_machine_id()}-"))
        self.close = weakref.finalize(self, _remove, self.path, os.getpid())
        """Removes the folder immediately."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed when the block ends."""
    folder = TemporaryFolder()
    try:
        yield folder.path
    finally:
        folder.close()


def temporary_suffix() -> str:
    """Return a suffix for names of temporary files that identifies this process."""
    return f".{os.getpid()}-{_machine_id()}-{secrets.token_hex(4)}.tmp"


def is_left_over(name: str) -> bool:
    """Return whether a name belongs to a temporary file or folder of a process that ended on this machine."""
    owner = _OWNER.search(name)
    return owner is not None and owner[2] == _machine_id() and not os.path.exists(f"/proc/{owner[1]}")


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # A forked child must not remove it.
        shutil.rmtree(path, ignore_errors=True)


@cache
def _remove_left_overs(system_folder: str) -> None:
    with suppress(OSError), os.scandir(system_folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and is_left_over(entry.name):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        shutil.rmtree(entry.path, ignore_errors=True)


@cache
def _machine_id() -> str:
    """Return an id of this boot and container, within which process ids are unique."""
    try:
        parts = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"  # It matches no name, so no file is removed.
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]
