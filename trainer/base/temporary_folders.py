"""Temporary folders that are removed even if their process is killed.

Each folder contains a file that its process keeps locked. The first folder that a process makes removes those
whose lock is free. The kernel releases a lock when its process ends, also in another container.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # On Windows, folders of killed processes stay.

PREFIX = "kubedet-tmp-"
_LOCK = ".lock"
_FILES = "files"

_swept: set[str] = set()  # the system's temporary folders that this process has swept


class TemporaryFolder:
    """A folder that is removed by `close`, with this object, or at the end of the process."""

    def __init__(self) -> None:
        """Make it."""
        sweep()
        lock = None
        while True:
            outer = Path(tempfile.mkdtemp(prefix=PREFIX))
            if not fcntl:
                break
            with suppress(FileNotFoundError):  # Another process swept it before it was locked: make another.
                lock = os.open(outer / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.exists(outer / _LOCK):
                    break
                os.close(lock)
        self.path = outer / _FILES
        """Folder for files."""
        self.path.mkdir()
        self.close = weakref.finalize(self, _remove, outer, lock, os.getpid())
        """Remove it now."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed when the block ends."""
    folder = TemporaryFolder()
    try:
        yield folder.path
    finally:
        folder.close()


def sweep() -> None:
    """Remove the folders of killed processes, once per process."""
    system_folder = tempfile.gettempdir()
    if not fcntl or system_folder in _swept:
        return
    _swept.add(system_folder)
    with suppress(OSError), os.scandir(system_folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _remove_unlocked(outer: Path) -> None:
    if outer.lstat().st_uid != os.getuid():
        return
    try:
        lock = os.open(outer / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        outer.rmdir()  # Fails unless it is empty: then its process makes another.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete(outer)
    finally:
        os.close(lock)


def _remove(outer: Path, lock: int | None, process: int) -> None:
    if os.getpid() == process:  # Not in a forked child.
        with suppress(OSError):
            _delete(outer)
        if lock is not None:
            os.close(lock)


def _delete(outer: Path) -> None:
    """Delete a folder, its lock last: if this process is killed meanwhile, the rest can still be swept."""
    shutil.rmtree(outer / _FILES, ignore_errors=True)
    (outer / _LOCK).unlink(missing_ok=True)
    outer.rmdir()
