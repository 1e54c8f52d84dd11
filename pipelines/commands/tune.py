"""`kubedet tune`: a search for hyper-parameters."""

import argparse
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import parameters
from pipelines.commands import Commands
from pipelines.commands.options import add_overrides, add_parameter, read_recipe
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.tuning.study import Study, TrialRecord

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "tune",
        help="search for a recipe's best hyper-parameters on this machine",
        description="Train trials of a recipe on the same shards, with values that Optuna's TPE chooses, end "
        "at a validation those that are behind (ASHA), and write the best as a file that --recipe takes. "
        "Stopped or killed, the same command goes on, and no trial counts twice. Exit code: 0; 2 for a "
        "mistake in what was asked or given; 143 when stopped; 1 otherwise.",
    )
    for name in ("recipe", "source", "data_root", "output"):
        add_parameter(parser, parameters.LOCAL[name])
    parser.add_argument(
        "--space", default="", metavar="FILE",
        help="YAML with the keys to search and what they may be (default: the recipe's own space)",
    )  # fmt: skip
    parser.add_argument("--show-space", action="store_true", help="print the space as such a file, and end")
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N",
        help="trials, those of earlier calls among them (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="M",
        help="trainings at the same time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--name", default="", help="name of the search (default: tune-RECIPE)")
    add_overrides(parser)
    parser.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from pipelines.tuning import spaces

    overrides = read_recipe(options)
    given = {
        name: getattr(options, name) or parameters.LOCAL[name].default
        for name in ("recipe", "source", "data_root", "output")
    }
    recipe, name = given["recipe"], options.name or f"tune-{given['recipe']}"
    _check(options, name)
    space = spaces.read(options.space) if options.space else spaces.builtin(recipe, overrides)
    spaces.check(space, recipe, overrides, options.space or f"of {recipe}")
    if options.show_space:
        print(spaces.text(space), end="")
        return 0
    try:
        import optuna as _optuna  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a search needs Optuna, which is not installed", fix="pip install 'kubedet[tune]'"
        ) from None
    from components import preparation
    from pipelines.tuning import search
    from pipelines.tuning.study import Search, Study
    from trainer import storage

    folder = Path(given["output"]).absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    root = storage.absolute(given["data_root"])
    _, (shards, _) = preparation.prepare(
        given["source"], recipe, overrides, root, "", str(folder / "shards.html"), trains=True
    )
    searched = Search(recipe, overrides, space, shards["uri"])
    study = Study(storage.join(root, "tuning", name), searched, options.trials)

    def start(record: "TrialRecord", stack: ExitStack) -> search.LocalTraining:
        of_trial = folder / "trials" / f"{record.number:05d}"
        of_trial.mkdir(parents=True, exist_ok=True)
        return search.LocalTraining(searched, record, of_trial, options.parallel, stack)

    def shown(line: str) -> None:
        print(line, flush=True)
        _publish(study, name, folder)

    search.run(study, options.trials, options.parallel, start, shown)
    _publish(study, name, folder)
    best = study.best()
    assert best is not None
    print(f"best: {search.describe(best)}\npage: {folder / 'tuning.html'}")
    print(f"kubedet run --recipe {folder / 'best.yaml'}")
    return 0


def _check(options: argparse.Namespace, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} cannot be a folder's",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    for option in ("trials", "parallel"):
        if getattr(options, option) < 1:
            raise ConfigError(
                f"--{option} must be 1 or more, not {getattr(options, option)}", fix=f"use --{option} 1"
            )


def _publish(study: "Study", name: str, folder: Path) -> None:
    """Write the page and the best configuration, in the search's folder and beside the study."""
    from pipelines.tuning.study import recipe_file
    from trainer import recipes, storage
    from trainer.report.tuning_page import TrialShown, page

    best = study.best()
    text = recipe_file(study.search, best) if best else ""
    metric = recipes.load(study.search.recipe, dict(study.search.overrides)).evaluation.metric
    trials = [
        TrialShown(record.number, record.state, record.value, record.validations, record.params)
        for record in study.records
    ]
    html = page(name, metric, trials, study.importances(), text)
    for place in (str(folder), study.uri):
        storage.write_bytes(storage.join(place, "tuning.html"), html.encode())
        if text:
            storage.write_bytes(storage.join(place, "best.yaml"), text.encode())
