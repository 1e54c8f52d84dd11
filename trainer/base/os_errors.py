"""Converts OSErrors to StorageErrors that name the file and the remedy."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.errors import MissingError, ResourceError, StorageError

_NO_ACCESS = (
    "give this user access to the file and its folders, or set fs_group or run_as_user of the job "
    "to one with this access"
)
_NO_FOLDER = "a file is in the place of a folder: move it or choose another folder"
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space there, or choose another folder, and run again",
    errno.EDQUOT: "the quota is used up: free space there, or choose another folder, and run again",
    errno.EFBIG: "files of this size are not allowed there (ulimit -f): choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.ENOMEM: "give this process more memory, and run again",
    errno.ENFILE: "wait until other programs have closed files, or raise the system's limit, and run again",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or lower the number of processes and threads",
    errno.EISDIR: "this is a folder: name a file in it",
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENAMETOOLONG: "choose a folder with a shorter path",
}
_EXHAUSTED_ERRNOS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_MEMORY_MESSAGES = (
    "memory allocation", "out of memory", "insufficient memory", "malloc of size", "not enough memory",
    "allocate memory", "could not create a primitive",
)  # fmt: skip
"""Parts of the messages of libjpeg(-turbo), Pillow, Arrow, torch and oneDNN when memory runs out."""


def missing_error(uri: str) -> MissingError:
    """Return the error for a file that does not exist."""
    return MissingError(f"no such file: {uri}", fix="check the path or URI, and that this machine can see it")


def raise_if_exhausted(error: BaseException, title: str = "an image", verb: str = "read") -> None:
    """Raise ResourceError if a decoder failed because memory or file descriptors ran out.

    Decoders raise the same exceptions for corrupt data, so an intact file could be reported as corrupt.
    """
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _MEMORY_MESSAGES):
        raise ResourceError(
            f"{title} cannot be {verb}: not enough memory", fix=_REMEDIES[errno.ENOMEM]
        ) from error
    # For a truncated file torch seeks to a negative offset: EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        fix = _REMEDIES.get(error.errno, "solve this problem, and run again")
        raise ResourceError(f"{title} cannot be {verb}: {os.strerror(error.errno)}", fix=fix) from error


@contextmanager
def name_resource_errors(title: str) -> Iterator[None]:
    """Add a file's name to ResourceErrors, and convert MemoryErrors to ResourceErrors."""
    try:
        yield
    except MemoryError as error:
        raise_if_exhausted(error, title)
    except ResourceError as error:
        raise ResourceError(f"{title}: {error.message}", fix=error.fix) from error


@contextmanager
def translate_oserror(uri: str, verb: str) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the URI and the remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing_error(uri) from error
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.ELOOP:
            problem = f"{uri} is a symbolic link to itself"
            raise MissingError(problem, fix="delete or replace the link") from error
        fix = _REMEDIES.get(error.errno, "check the path, its permissions and the disk, and run again")
        kind = ResourceError if error.errno in _EXHAUSTED_ERRNOS else StorageError
        raise kind(f"cannot {verb} {uri}: {error.strerror}", fix=fix) from error


@contextmanager
def translate_named_oserrors() -> Iterator[None]:
    """Convert OSErrors that name a file or report exhausted resources to StorageErrors.

    For the outermost level of a program.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (*_EXHAUSTED_ERRNOS, errno.ENOSPC, errno.EDQUOT) and not error.filename:
            message = f"this process cannot continue: {error.strerror}"
            raise ResourceError(message, fix=_REMEDIES[error.errno]) from error
        if error.errno is None or not isinstance(error.filename, str | bytes) or not error.filename:
            raise
        with translate_oserror(os.fsdecode(error.filename), "use"):
            raise
