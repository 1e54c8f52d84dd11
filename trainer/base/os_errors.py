"""Errors of the operating system as StorageErrors that name the file and the remedy."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.errors import MissingError, StorageError, WantError

_NO_ACCESS = (
    "give this user access to the file and its folders, or set fs_group or run_as_user of the job "
    "to one that has it"
)
_NO_FOLDER = "a file stands where a folder is needed: move it away or choose another folder"

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

_OF_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_WANTS = (
    "memory allocation",
    "out of memory",
    "insufficient memory",
    "malloc of size",
    "not enough memory",
    "allocate memory",
)
"""What messages of decoders say that have no memory: of libjpeg(-turbo), Pillow, Arrow and torch."""


def missing(uri: str) -> MissingError:
    """Return the error for a file that is not there."""
    return MissingError(f"no such file: {uri}", fix="check the path or URI, and that this machine can see it")


def refuse_want(error: BaseException, what: str = "an image") -> None:
    """Raise the error of a machine that lacks memory or the like, where that is why something was not read.

    Decoders raise then what they raise for damaged bytes, too: a whole file would be taken for damaged.

    Args:
        error: of a decoder.
        what: it read.

    Raises:
        WantError: it is not about the bytes.
    """
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _WANTS):
        raise WantError(
            f"{what} cannot be read: there is not enough memory", fix=_REMEDIES[errno.ENOMEM]
        ) from error
    if isinstance(error, OSError) and error.errno is not None:
        fix = _REMEDIES.get(error.errno, "see to that, and run again")
        raise WantError(f"{what} cannot be read: {os.strerror(error.errno)}", fix=fix) from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Name a file in the WantErrors of functions that know its bytes alone; MemoryErrors become one."""
    try:
        yield
    except MemoryError as error:
        refuse_want(error, what)
    except WantError as error:
        raise WantError(f"{what}: {error.message}", fix=error.fix) from error


@contextmanager
def files_explained() -> Iterator[None]:
    """Turn the OSErrors that are about a file into StorageErrors that name it, wherever they come from.

    For a program's outermost level: what a system refuses of a file that a user named is no fault of ours.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or not isinstance(error.filename, str | bytes) or not error.filename:
            raise
        with explained(os.fsdecode(error.filename), "use"):
            raise


@contextmanager
def explained(uri: str, verb: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the URI and the remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing(uri) from error
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.ELOOP:
            problem = f"{uri} is a symbolic link to itself"
            raise MissingError(problem, fix="delete or replace the link") from error
        fix = _REMEDIES.get(error.errno, "check the path, its permissions and the disk, and run again")
        kind = WantError if error.errno in _OF_MACHINE else StorageError
        raise kind(f"cannot {verb} {uri}: {error.strerror}", fix=fix) from error
