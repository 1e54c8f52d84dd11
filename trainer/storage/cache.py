"""Local copies of files on servers, kept under a name that changes with their content."""

import hashlib
import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from trainer.os_errors import explained
from trainer.storage.local import new_file
from trainer.storage.sinks import FileSink
from trainer.storage.transfer import Opener, fetch
from trainer.storage.uris import FileState


def copy(uri: str, found: FileState, open_range: Opener, folder: Path | None, sha256: str) -> Path:
    """Return the copy of a file, downloaded if there is none of this version."""
    folder = folder or Path(tempfile.gettempdir()) / f"kubedet-cache-{os.getuid()}"
    name = re.sub(r"[^A-Za-z0-9._-]", "_", PurePosixPath(urlsplit(uri).path).name)[-80:]
    digest = hashlib.sha256(f"{uri} {found.version}".encode()).hexdigest()[:16]
    path = folder / f"{digest}-{name}"
    if path.is_file() and path.stat().st_size == found.size:
        return path
    with explained(str(folder), "write"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with new_file(str(path), sync=False) as temporary, temporary.open("w+b", buffering=0) as file:
        fetch(uri, open_range, FileSink(file.fileno()), sha256=sha256)
    return path
