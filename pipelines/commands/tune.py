"""`kubedet tune`: a search for hyper-parameters, on this machine or as one run in Kubeflow."""

import argparse
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import parameters
from pipelines.commands import Commands, cluster_options
from pipelines.commands.options import add_overrides, add_parameter, read_recipe
from trainer import storage
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from operations.tuning.space import Space
    from operations.tuning.study import Trial

_IN_CLUSTER = ("claim", "credentials", "data_version", "notify", "prune", "step_cpu", "step_memory")
"""Parameters of the pipeline that a search in Kubeflow has, and one on this machine has not."""
_HERE = ("recipe", "source", "data_root", "output")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "tune",
        help="search for a recipe's best hyper-parameters, here or in a cluster",
        description="Train trials of a recipe on the same shards, with values that Optuna's TPE chooses, end "
        "at a validation those that are behind (ASHA), and write the best as a file that --recipe takes. "
        "Stopped or killed, the same command goes on, and no trial counts twice. Exit code: 0; 2 for a "
        "mistake in what was asked or given; 143 when stopped; 1 otherwise.",
    )
    for name in _HERE:
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
    _add_cluster(parser)
    parser.set_defaults(command=_tune)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "in Kubeflow", "With --submit the search is one run of Kubeflow Pipelines, each trial in its own pod."
    )
    group.add_argument("--submit", action="store_true", help="search there, and not on this machine")
    group.add_argument("--wait", action="store_true", help="follow the run to its end; its exit code")
    group.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    group.add_argument(
        "--gpus", type=int, default=0, metavar="N", dest="trial_gpus",
        help="GPUs of each trial's pod, a training process each (default: %(default)s)",
    )  # fmt: skip
    for name in _IN_CLUSTER[:-2]:
        add_parameter(group, parameters.TABLE[name])
    cluster_options.add_sizes(
        group, "default: small for sample, large for coco:2017 and openimages:, else medium"
    )
    cluster_options.add_experiment(group)
    cluster_options.add_limits(group)
    cluster_options.add_access(parser)


def _tune(options: argparse.Namespace) -> int:
    from operations.tuning import space, study_name

    overrides = read_recipe(options)
    recipe = options.recipe or parameters.LOCAL["recipe"].default
    _check(options)
    name = study_name(options.name, recipe)
    content = storage.read_bytes(options.space) if options.space else ""
    searched = space.parse(content, recipe, overrides, options.space or f"the space of {recipe}")
    if options.show_space:
        print(space.text(searched), end="")
        return 0
    if options.submit:
        return _submit(options, name, overrides, space.text(searched, one_line=True))
    return _search_here(options, name, overrides, searched)


def _check(options: argparse.Namespace) -> None:
    for option in ("trials", "parallel"):
        if getattr(options, option) < 1:
            raise ConfigError(
                f"--{option} must be 1 or more, not {getattr(options, option)}", fix=f"use --{option} 1"
            )
    if options.submit:
        if options.output is not None:
            raise ConfigError(
                "--output means nothing with --submit: all of a search is kept under its data root",
                fix="leave it out",
            )
        return
    further = ("wait", "dry_run", "trial_gpus", "size", "deadline", "ttl", "host", "namespace", "ca")
    given = [name for name in (*_IN_CLUSTER, *further) if getattr(options, name)]
    if given:
        words = ", ".join(f"--{name.replace('trial_', '').replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{words}: means nothing to a search on this machine", fix="add --submit to search in Kubeflow"
        )


def _submit(options: argparse.Namespace, name: str, overrides: dict[str, Any], space: str) -> int:
    """Start the search as a run of Kubeflow's."""
    from pipelines.commands import submit

    # As `kubedet submit` has them, which this has otherwise, or not.
    options.study, options.space, options.job = name, space, []
    options.output, options.until, options.partitions = None, "", 1
    submission = cluster_options.submission(
        options, f"{name}-{datetime.now():%Y%m%d-%H%M%S}", overrides=overrides,
        trials=options.trials, gpus=options.trial_gpus, parallelism=options.parallel,
    )  # fmt: skip
    root = submission.parameters.get("data_root") or parameters.default("data_root", submission.form)
    print(f"the search's page and best configuration: {root}/tuning/{name}", flush=True)
    return submit.send(options, submission)


def _search_here(options: argparse.Namespace, name: str, overrides: dict[str, Any], space: "Space") -> int:
    """Search on this machine."""
    try:
        import optuna as _optuna  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a search needs Optuna, which is not installed", fix="pip install 'kubedet[tune]'"
        ) from None
    from components import preparation
    from operations.tuning import search, study_folder
    from operations.tuning.study import Search, Study

    given = {name: getattr(options, name) or parameters.LOCAL[name].default for name in _HERE}
    folder = Path(given["output"]).absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    root = storage.absolute(given["data_root"])
    _, (shards, _) = preparation.prepare(
        given["source"], given["recipe"], overrides, root, "", str(folder / "shards.html"), trains=True
    )
    searched = Search(given["recipe"], overrides, space, shards["uri"])
    study = Study(study_folder(root, name), searched, options.trials)

    def start(trial: "Trial", stack: ExitStack) -> search.LocalTraining:
        of_trial = folder / "trials" / f"{trial.number:05d}"
        of_trial.mkdir(parents=True, exist_ok=True)
        return search.LocalTraining(
            searched, trial, str(of_trial), stack, parallel=options.parallel, log=of_trial / "log.txt"
        )

    def shown(line: str) -> None:
        print(line, flush=True)
        search.publish(study, name, str(folder))

    search.train(study, range(options.trials), options.parallel, start, shown)
    best = search.finish(study, name, str(folder))
    print(f"best: {best}\npage: {folder / search.PAGE}")
    print(f"kubedet run --recipe {folder / search.BEST}")
    return 0
