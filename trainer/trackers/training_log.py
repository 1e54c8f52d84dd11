"""Writes the metrics of a training run to metrics.jsonl and TensorBoard."""

import json
import logging
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from trainer import storage
from trainer.base.os_errors import translate_oserror
from trainer.base.temporary_folders import TemporaryFolder

METRICS = "metrics.jsonl"  # file in the run folder
_CHECKSUM = re.compile(r', "([^"]*)": "([^"]{8})"\}$')
"""End of a row: the CRC-32 of the text before it, valid or not."""
_LOG = logging.getLogger("train")


class TrainingLog:
    """Log of metrics by step. A resumed run appends to the same file, without repeating steps.

    If the run folder is not local, `publish` uploads the files. All methods raise StorageError if the
    folder cannot be written. The class is thread-safe.
    """

    def __init__(
        self,
        output_uri: str,
        step: int,
        validated: int = 0,
        listener: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Open the log of a run, and drop training rows after `step` and validation rows after `validated`.

        `listener` is called with the kind and the row after each row is written.
        """
        # Imports PyTorch, which `read_rows` does not need.
        from torch.utils.tensorboard import SummaryWriter

        self._uri, self._listener = output_uri, listener
        self._lock = threading.Lock()
        self._local = storage.is_local(output_uri)
        self._temporary = None if self._local else TemporaryFolder()
        self._folder = self._temporary.path if self._temporary else storage.local_path(output_uri)
        path, last = self._folder / METRICS, {"train": step, "val": validated}
        rows = read_rows(output_uri) if step else []
        kept = [row for row in rows if row["step"] <= last[row["kind"]]]
        storage.write_bytes(str(path), "".join(map(format_row, kept)).encode())
        with translate_oserror(output_uri, "write"):
            self._file = path.open("a")
            board = self._folder / "tensorboard"
            self._board = SummaryWriter(str(board), purge_step=step + 1 if step else None)

    def add(self, kind: str, row: Mapping[str, Any]) -> None:
        """Write a row; `kind` is "train" or "val", row["step"] is the optimizer step."""
        with self._lock, translate_oserror(self._uri, "write"):
            self._file.write(format_row({"kind": kind, **row}))
            self._file.flush()
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(f"{kind}/{name.removeprefix('coco/')}", value, row["step"])
        if self._listener:
            self._listener(kind, row)

    def publish(self) -> None:
        """Upload the files to the run folder."""
        with translate_oserror(self._uri, "write"):
            self._board.flush()
        if not self._local:
            for path in self._folder.rglob("*"):
                if path.is_file():
                    # Read the whole file first: rows may be added during the upload.
                    uri = storage.join(self._uri, *path.relative_to(self._folder).parts)
                    storage.write_bytes(uri, path.read_bytes())

    def close(self) -> None:
        """Close the files."""
        with translate_oserror(self._uri, "write"):
            self._file.close()
            self._board.close()
        if not self._local:
            shutil.rmtree(self._folder, ignore_errors=True)


def read_rows(output_uri: str) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, except damaged rows and a truncated last row."""
    uri = storage.join(output_uri, METRICS)
    if not storage.exists(uri):
        return []
    rows, damaged = [], 0
    lines = storage.read_bytes(uri).decode(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        checksum = _CHECKSUM.search(line)
        try:
            row = json.loads(line)
            is_valid = checksum is not None and row.pop("crc32") == _crc(line[: checksum.start()])
        except (ValueError, KeyError, AttributeError, RecursionError):
            is_valid = False
        if is_valid:
            rows.append(row)
        elif number < len(lines):
            damaged += 1
    if damaged:
        _LOG.warning("%s: skipped %d of %d rows, which are damaged", uri, damaged, len(lines))
    return rows


def format_row(row: Mapping[str, Any]) -> str:
    """Format a row as a JSON line with a checksum; the growing file cannot have one for the whole."""
    text = json.dumps(row)[:-1]
    return f'{text}, "crc32": "{_crc(text)}"}}\n'


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
