"""Writes the pipeline as the one file that a cluster takes and `kubedet run` executes."""

import contextlib
from pathlib import Path

from kfp import compiler

from pipelines.graph import pipeline
from trainer.errors import StorageError


def compile_pipeline(path: Path, *, volume: bool = False) -> None:
    """Compile the pipeline to YAML, whole or not at all.

    Args:
        path: the file to write.
        volume: mount a PersistentVolumeClaim in every step.

    Raises:
        StorageError: the file cannot be written.
    """
    # kfp decides on the format by the suffix.
    temporary = path.with_name(f".{path.stem}.tmp.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(pipeline(volume=volume), str(temporary))
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another place") from error
    finally:
        with contextlib.suppress(OSError):  # Where no folder could be made there is no file.
            temporary.unlink()
