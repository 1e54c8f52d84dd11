"""`kubedet submit` runs the pipeline in a cluster; `kubedet tune` searches hyper-parameters there or here."""

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import Access, parameters
from pipelines.commands import Commands, option, options
from pipelines.parameters import Values
from trainer import storage
from trainer.base.errors import ConfigError, check_name

if TYPE_CHECKING:
    from pipelines.kubeflow import Server
    from pipelines.submission import Submission

_CLUSTER_OPTIONS = ("claim", "credentials", "data_version", "notify", "prune", "step_cpu", "step_memory")
"""Parameters that a search has only in Kubeflow."""
_LOCAL_OPTIONS = ("recipe", "source", "data_root", "output")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "submit",
        description="Compile the pipeline and start a run of it in Kubeflow Pipelines. With --wait the exit "
        "code is 1 if the run fails.",
    )
    option(parser, "--name NAME", "name of the run (default: the recipe and the time)")
    _add_sending(parser)
    options.add_run(parser)
    options.add_compile_options(parser)
    options.add_access(parser)
    parser.set_defaults(command=lambda arguments: _send(arguments, read_submission(arguments)))


def _add_sending(parser: options.Group) -> None:
    """Declare --wait and --dry-run."""
    option(parser, "--wait", "follow the run to its end")
    option(parser, "--dry-run", "print what would be sent, without sending it")


def read_submission(arguments: argparse.Namespace) -> "Submission":
    """Return the run that the options of `kubedet submit` describe, checked."""
    recipe = Path(arguments.recipe or parameters.default("recipe")).stem
    name = arguments.name or f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    return options.submission(arguments, name)


def _send(arguments: argparse.Namespace, submission: "Submission") -> int:
    """Start a run, or print what would be sent, as `_add_sending` declares; return the exit code."""
    compiled = submission.options
    if arguments.dry_run:
        print("nothing is sent; this would be:")
        _describe(submission, Access.find(arguments.host, arguments.namespace, arguments.ca))
        return 0
    from components import jobs, launchers

    server = options.connect(arguments)
    run_id, link = start(submission, server)
    _describe(submission, server.access)
    print(f"run {run_id}\n{link}")
    launcher = launchers.entry(submission.get("launcher"))
    if not (compiled.until or compiled.trials) and launcher.pods:
        where = f" -n {server.namespace}" if server.namespace else ""
        print(f"its training, when the data is ready: kubedet job status{where} {jobs.name_of(run_id)}")
    sys.stdout.flush()
    if arguments.wait:
        try:
            follow(submission, server, run_id)
        except KeyboardInterrupt:
            print(f"the run continues: {link}", file=sys.stderr)
            raise
    return 0


def start(submission: "Submission", server: "Server") -> tuple[str, str]:
    """Check the cluster and start a run; return its id and its address in the UI."""
    from pipelines import preflight

    preflight.check(submission, server.namespace)
    experiment = server.experiment(submission.experiment)
    run_id = server.create_run(submission.name, experiment, submission.package(), {**submission.parameters})
    return run_id, server.link("runs", run_id)


def follow(submission: "Submission", server: "Server", run_id: str) -> None:
    """Print the states of a started run until it has ended; see `wait.follow`."""
    from components.launchers.spec import START_TIMEOUT
    from pipelines import wait

    compiled, parameters = submission.options, submission.parameters
    wait.follow(
        server,
        run_id,
        deadline=compiled.deadline,
        conditional=compiled.conditional,
        start_timeout=parameters.get("job", {}).get("start_timeout", START_TIMEOUT),
    )


def _describe(submission: "Submission", access: Access) -> None:
    from components.images import COMPONENT_IMAGE
    from pipelines.submission import argument

    print(f"  host        {access.host or 'the cluster of this pod or kubeconfig'}")
    print(f"  namespace   {access.namespace or '(the default one)'}")
    print(f"  experiment  {submission.experiment}")
    print(f"  run         {submission.name}")
    print(f"  image       {COMPONENT_IMAGE}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    print("the equivalent kfp command:")
    print("".join(f"  {line}\n" for line in submission.commands(access)), end="", flush=True)


def add_tune(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        description="Train trials of a recipe on the same shards, with values from Optuna's TPE, stop those "
        "that fall behind (ASHA), and write the best as a recipe file. Repeat the command to continue a "
        "stopped search.",
    )
    for name in _LOCAL_OPTIONS:
        options.add_parameter(parser, parameters.LOCAL[name])
    text = "YAML file with the keys to search and their ranges (default: the recipe's space)"
    option(parser, "--space FILE", text)
    option(parser, "--show-space", "print the search space in this format, and exit")
    option(parser, "--trials N", "number of trials, including those of earlier calls", 20, least=1)
    option(parser, "--parallel M", "number of concurrent trials", 1, least=1)
    option(parser, "--name NAME", "name of the search (default: tune-RECIPE)")
    options.add_overrides(parser)
    group = parser.add_argument_group(
        "in Kubeflow", "With --submit the search is one run of Kubeflow Pipelines, with a pod for each trial."
    )
    option(group, "--submit", "search in Kubeflow")
    _add_sending(group)
    text = "GPUs of each trial's pod, with one training process per GPU (default: 0)"
    option(group, "--gpus N", text, 0, dest="trial_gpus")
    for name in _CLUSTER_OPTIONS[:-2]:
        options.add_parameter(group, parameters.TABLE[name])
    options.add_sizes(group, options.BY_SOURCE)
    option(group, "--experiment NAME", "experiment that contains the runs", "kubedet")
    options.add_limits(group)
    options.add_access(parser)
    parser.set_defaults(command=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    from operations.tuning import space

    overrides = options.read_recipe(arguments)
    recipe = arguments.recipe or parameters.LOCAL["recipe"].default
    if arguments.submit and arguments.output is not None:
        raise ConfigError(
            "--output has no effect with --submit: a search is stored in its data root", fix="leave it out"
        )
    further = ("wait", "dry_run", "trial_gpus", "size", "deadline", "ttl", "host", "namespace", "ca")
    given = [name for name in (*_CLUSTER_OPTIONS, *further) if getattr(arguments, name)]
    if given and not arguments.submit:
        words = ", ".join(f"--{name.replace('trial_', '').replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{words}: no effect in a search on this machine", fix="add --submit to search in Kubeflow"
        )
    name = arguments.name or f"tune-{recipe}"
    check_name(name, "--name")
    content = storage.read_bytes(arguments.space) if arguments.space else ""
    searched = space.parse(content, recipe, overrides, arguments.space or f"the space of {recipe}")
    if arguments.show_space:
        print(space.text(searched))
        return 0
    if arguments.submit:
        # Options of `kubedet submit` that this command lacks or names differently.
        arguments.study, arguments.space, arguments.job = name, space.text(searched, one_line=True), []
        arguments.output, arguments.until = None, ""
        submission = options.submission(
            arguments,
            f"{name}-{datetime.now():%Y%m%d-%H%M%S}",
            overrides=overrides,
            trials=arguments.trials,
            gpus=arguments.trial_gpus,
            parallelism=arguments.parallel,
        )
        place = f"{submission.get('data_root')}/tuning/{name}"
        print(f"the search's page and best configuration: {place}", flush=True)
        return _send(arguments, submission)
    return _search_locally(arguments, name, overrides, content)


def _search_locally(arguments: argparse.Namespace, name: str, overrides: Values, space: str | bytes) -> int:
    from operations.tuning import search
    from trainer.steps.download import download
    from trainer.steps.manifests import RawData
    from trainer.steps.shard import shard

    given = {name: getattr(arguments, name) or parameters.LOCAL[name].default for name in _LOCAL_OPTIONS}
    folder = Path(given["output"]).absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    root = storage.absolute(given["data_root"])
    raw = download(given["source"], root, given["recipe"], overrides, trains=True)
    assert isinstance(raw, RawData)  # There is no condition.
    shards = shard(raw)
    study = search.Study(
        root, name, given["recipe"], overrides, space, shards.uri, arguments.trials, str(folder)
    )
    search.train(study, range(arguments.trials), arguments.parallel)
    search.finish(study)
    return 0
