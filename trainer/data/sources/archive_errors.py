"""What Python's readers of zips and tars raise, as errors that name the archive and the remedy."""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.errors import DataError, StorageError

_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)


@contextmanager
def archive_explained(said: str, kind: type[DataError] | type[StorageError] = DataError) -> Iterator[None]:
    """Turn what is raised for an archive that cannot be read into an error of the program.

    Args:
        said: what cannot be done with which archive.
        kind: of the error.

    Raises:
        DataError, StorageError: it is damaged, or packed in a way that Python does not know.
    """
    try:
        yield
    except NotImplementedError as error:
        # zipfile's, of a method or version of the format; fetched again it would be no other.
        raise kind(f"{said}: {error}", fix="pack it anew with deflate, as zip -r does") from None
    except _DAMAGED as error:
        raise kind(f"{said}: {error}", fix="pack or fetch it again") from None
    except OSError as error:
        # Of gzip and bz2 for damaged bytes; those of the system have a number.
        if error.errno is not None:
            raise
        raise kind(f"{said}: {error}", fix="pack or fetch it again") from None
