"""Temporary folders that are gone when nobody needs them, whatever ended their process.

What kills a process leaves its folders. Each of ours holds a file that its process has locked for as long as
it lives; the first folder that a process makes removes those whose lock nobody has. The system gives a lock
back with the last process that holds it, also in another container: no folder in use is taken for a dead one.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "kubedet-tmp-"
_LOCK = ".lock"
_FILES = "files"

_swept: set[str] = set()
"""Folders of the system in which this process has looked for what others left."""


class TemporaryFolder:
    """A folder that is removed by `close`, with this object, or at the end of the process."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: the system's folder for such cannot be written.
        """
        sweep()
        outer, lock = _made()
        self.path = outer / _FILES
        """Where files go."""
        self.path.mkdir()
        self.close = weakref.finalize(self, _remove, outer, lock, os.getpid())
        """Remove it now."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder that is removed when the block ends."""
    folder = TemporaryFolder()
    try:
        yield folder.path
    finally:
        folder.close()


def sweep() -> None:
    """Remove the folders that killed processes left, once in a process."""
    place = tempfile.gettempdir()
    if place in _swept:
        return
    _swept.add(place)
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_dead(Path(entry.path))


def _made() -> tuple[Path, int]:
    """Make a folder and lock it; returns it with the lock's descriptor."""
    while True:
        outer = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Whoever sweeps may be between: then the folder is gone, and another is made.
        with suppress(FileNotFoundError):
            lock = os.open(outer / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(outer / _LOCK):
                return outer, lock
            os.close(lock)


def _remove_dead(outer: Path) -> None:
    """Remove a folder of ours whose lock nobody has."""
    if outer.lstat().st_uid != os.getuid():
        return
    try:
        lock = os.open(outer / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        outer.rmdir()  # Unless there is anything in it: whoever has just made it makes another.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(outer)
    finally:
        os.close(lock)


def _remove(outer: Path, lock: int, process: int) -> None:
    # A child that was forked inherits this, and not the folder.
    if os.getpid() == process:
        with suppress(OSError):
            _empty(outer)
        os.close(lock)


def _empty(outer: Path) -> None:
    """Remove a folder, its lock last: who is killed meanwhile leaves what can still be told to be ours."""
    shutil.rmtree(outer / _FILES, ignore_errors=True)
    (outer / _LOCK).unlink(missing_ok=True)
    outer.rmdir()
