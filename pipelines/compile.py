"""Writes the pipeline as the one file that a cluster takes and `kubedet run` executes."""

import contextlib
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from pipelines import parameters
from pipelines.compiler_fixes import inline_conditions, pass_parameters
from pipelines.forms import Form
from pipelines.graph import pipeline
from trainer.base.errors import StorageError

PLAIN = Form()
"""The form that most runs need: data in a bucket, brought and sharded by one pod."""


def compile_pipeline(path: Path, form: Form = PLAIN) -> None:
    """Compile the pipeline to YAML, whole or not at all.

    Args:
        path: the file to write.
        form: what is fixed when it is compiled.

    Raises:
        StorageError: the file cannot be written.
    """
    # kfp decides on the format by the suffix.
    temporary = path.with_name(f".{path.stem}.tmp.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(pipeline(form), str(temporary))
        head, documents = _read(temporary.read_text())
        _arrange(documents[0])
        temporary.write_text(head + yaml.safe_dump_all(documents, sort_keys=True))
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another place") from error
    finally:
        with contextlib.suppress(OSError):  # Where no folder could be made there is no file.
            temporary.unlink()


def _read(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the comment at the beginning, which lists the parameters for people, and the documents."""
    lines = text.splitlines(keepends=True)
    count = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[:count]), list(yaml.safe_load_all(text))


def _arrange(spec: dict[str, Any]) -> None:
    pass_parameters(spec)
    inline_conditions(spec)
    for component in spec["components"].values():
        for name, argument in component.get("inputDefinitions", {}).get("parameters", {}).items():
            if argument.get("description") == parameters.ELSEWHERE:
                argument["description"] = parameters.TABLE[name].description
    for name, parameter in spec["root"]["inputDefinitions"]["parameters"].items():
        if choices := parameters.TABLE[name].choices:
            # kfp's own compiler cannot say it yet (2.17.0).
            parameter["literals"] = list(choices)
