"""`kubedet.train`, which calls the parser of the command."""

import argparse
import os
from collections.abc import Mapping
from typing import NoReturn

from kubedet.results import Run
from pipelines.cli import check_words, make_parser, translate_errors
from pipelines.commands import Parser
from trainer.base.errors import ConfigError, Interrupted, TrainingError


@translate_errors("kubedet.train")
def train(
    source: str | None = None,
    recipe: str | None = None,
    *,
    minutes: float | None = None,
    overrides: Mapping[str, object] | None = None,
    **options: object,
) -> Run:
    """Prepare data, train, evaluate and export on this machine, as `kubedet run`, and show the progress.

    Args:
        source: images and boxes, e.g. `yolo:cards.zip`; by default images that the program draws.
        recipe: a configuration: a name, or a file.
        minutes: short for overrides={"train.minutes": minutes}: train for at most so long.
        overrides: values of the configuration by key.
        options: name, data_root, output, nproc, gate, ...

    Raises:
        Interrupted: it was stopped; call it again with the same name to continue.
        KubedetError: an argument cannot be used, or a step failed.

    Examples:
        >>> tiny = {"train.epochs": 1, "loader.image_size": 96, "model.backbone_width": 8}
        >>> run = kubedet.train("sample:images=12,size=96", overrides=tiny, name="tiny", nproc=1)
        run tiny: recipe debug, source sample:images=12,size=96
        ...
        >>> sorted(run.metrics)[:2], run.model.names
        (['coco/AP', 'coco/AP50'], ['circle', 'square', 'triangle', 'star', 'ring'])
    """
    from pipelines.commands import run
    from trainer import storage
    from trainer.config.schema import MINUTES

    values = ({MINUTES: minutes} if minutes is not None else {}) | dict(overrides or {})
    chosen = run.read_options(_parse("run", source=source, recipe=recipe, set=values, **options))
    record, _ = run.execute(chosen)
    if record.status == "interrupted":
        again = f"call it again with name={chosen.name!r} and the same arguments to continue"
        raise Interrupted(f"the run {chosen.name} was stopped", fix=again)
    if record.error:
        message, _, fix = record.error["message"].partition("\n  fix: ")
        step = record.error["step"] or "run"
        raise TrainingError(f"{step}: {message}", fix=fix or f"read {chosen.folder / 'log.txt'}")
    paths, passed = record.paths, bool(record.gate.get("passed"))
    shards = storage.read_json(paths["metrics"])["shards"] if "metrics" in paths else ""
    trained = paths.get("model") or paths.get("checkpoint", "")
    folder, report = str(chosen.folder), paths.get("report", "")
    return Run(
        folder=folder, report=report, metrics=record.metrics, passed=passed, shards=shards, name=chosen.name,
        trained=trained,
    )  # fmt: skip


class _Parser(Parser):
    """Reports mistakes as ConfigError."""

    def error(self, message: str) -> NoReturn:
        text, _, fix = message.partition("\n  fix: ")
        raise ConfigError(text, fix=fix or f"`{self.prog} --help` lists the options")


def _path(value: str | os.PathLike[str]) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{value!r} is neither a name nor a path", fix="pass a text or a pathlib.Path")
    return os.fspath(value)


def _parse(command: str, *positional: str | os.PathLike[str], **given: object) -> argparse.Namespace:
    """Return the options of a command, checked as on the command line; None and False are left out."""
    from trainer.config.parsing import as_override

    words = [*command.split(), *map(_path, positional)]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            write = as_override if name == "set" else "{}={}".format
            words += [f"{flag}={write(key, each)}" for key, each in value.items()]
        elif isinstance(value, list | tuple):
            words += [f"{flag}={each}" for each in value]
        elif value is not None and value is not False:
            words.append(flag if value is True else f"{flag}={value}")
    check_words(words)
    return make_parser(words[0], _Parser).parse_args(words)
