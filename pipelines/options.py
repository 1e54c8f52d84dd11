"""What `kubedet run` is asked to do, and whether that can be done."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components import warm_start
from operations import retrain_condition
from pipelines import checks, parameters, run_report
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.config.parsing import parse_value
from trainer.data import sources
from trainer.evaluation.gate import parse, split_rules
from trainer.model import recipes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Options:
    """What `kubedet run` was asked for."""

    name: str
    """Name of the run and of its folder."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the pipeline, of those in `parameters.LOCAL`; what is not named has its default there."""
    verbose: bool = False
    """Show the local runner's own log too."""
    prices: str = ""
    """Absolute URI of a file of prices; empty is the data root's own."""

    def __getitem__(self, name: str) -> Any:
        """Return a parameter's value, given or not."""
        return self.given.get(name, parameters.LOCAL[name].default)

    @property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return Path(self["output"]).absolute() / self.name

    def command(self) -> str:
        """Return the command line that starts this run, or goes on with it."""
        words = [run_report.program(), "run", "--name", self.name]
        for name, item in parameters.LOCAL.items():
            if name != "overrides" and self[name] != item.default:
                words += [item.option, str(self[name])]
        words += ["--prices", self.prices] if self.prices else []
        for key, value in self["overrides"].items():
            plain = isinstance(value, str) and parse_value(value) == value
            words += ["--set", f"{key}={value if plain else json.dumps(value)}"]
        return shlex.join(words)

    def arguments(self) -> dict[str, Any]:
        """Return the pipeline's parameters."""
        values = {name: self[name] for name in parameters.LOCAL}
        folders = {"data_root": storage.absolute(self["data_root"]), "output": str(self.folder)}
        retrain_condition.of_form(values)
        return values | folders | {"nodes": 1, "launcher": "local"}


def check(options: Options) -> None:
    """Refuse what cannot run before anything is started or written.

    Raises:
        ConfigError: naming every name, source, recipe, key, value, rule and number that cannot be used.
    """

    def name() -> None:
        if not _NAME.fullmatch(options.name):
            raise ConfigError(
                f"the name {options.name!r} cannot be a folder's",
                fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )

    def processes() -> None:
        if options["nproc"] < 1:
            raise ConfigError(f"--nproc must be 1 or more, not {options['nproc']}", fix="use --nproc 1")

    def gate_of_recipe() -> None:
        config = recipes.load_here(options["recipe"], options["overrides"])
        for rule in [] if options["gate"] else config.evaluation.gate:
            parse(rule)

    def occasion_() -> None:
        retrain_condition.Condition(options["min_new_images"], options["min_drift"]).check()
        warm_start.check(options["warm_start"])

    rules = (partial(parse, rule) for rule in split_rules(options["gate"]))
    source = partial(sources.parse, options["source"])
    data_root = partial(storage.check_place, options["data_root"])
    checks.make_all([name, processes, occasion_, source, data_root, gate_of_recipe, *rules])
