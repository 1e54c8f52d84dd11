"""Options of the commands that send a run to Kubeflow Pipelines: where to, and what."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pipelines import parameters
from pipelines.commands.options import add_overrides, add_parameter, read_recipe
from pipelines.forms import ENDS
from pipelines.sizes import SIZES
from trainer.base.errors import ConfigError
from trainer.config.parsing import parse_overrides

if TYPE_CHECKING:
    from pipelines.access import Access
    from pipelines.kubeflow import Server
    from pipelines.submission import Submission

BY_SOURCE = "default: small for sample, large for coco:2017 and openimages:, else medium"
"""What is said of leaving out the size."""

_SIZES = ("step_cpu", "step_memory")
"""Parameters that a size stands for."""


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare where Kubeflow Pipelines is."""
    group = parser.add_argument_group(
        "Kubeflow Pipelines",
        "The token, where one is needed, is in the variable KFP_EXISTING_TOKEN, as for kfp itself; a pod's "
        "own is found. Without a host: the cluster around this process, or that of the kubeconfig.",
    )
    group.add_argument("--host", default="", metavar="URL", help="its API (default: $KFP_ENDPOINT)")
    group.add_argument(
        "--namespace",
        default="",
        metavar="NAME",
        help="your profile's, where several users share it (default: $KFP_NAMESPACE)",
    )
    group.add_argument("--ca", default="", metavar="FILE", help="certificate of the host's own authority")


def add_run(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Declare what to run: the pipeline's parameters, each with the default it has there.

    Args:
        parser: the command's.
        without: parameters that the command gives itself.
    """
    group = parser.add_argument_group("what to run")
    for name, item in parameters.TABLE.items():
        if item.metavar and name not in (*_SIZES, *without):
            add_parameter(group, item)
    add_sizes(group, BY_SOURCE)
    add_overrides(group)
    group.add_argument(
        "--job", action="append", default=[], metavar="FIELD=VALUE",
        help="set one further field of the training job, e.g. memory_limit=64Gi or "
        "network.profile=rdma; may be given again; `kubedet job fields` says what there is",
    )  # fmt: skip
    add_experiment(group)


def add_experiment(group: "argparse._ActionsContainer") -> None:
    """Declare which experiment a run belongs to."""
    group.add_argument(
        "--experiment", default="kubedet", metavar="NAME", help="experiment of the runs (default: kubedet)"
    )


def add_sizes(group: "argparse._ActionsContainer", default: str) -> None:
    """Declare how much the pods of the heavy steps ask for.

    Args:
        group: where the options belong.
        default: what is said of leaving them out.
    """
    sizes = "; ".join(f"{name}: {cpu} cores, {memory}" for name, (cpu, memory) in SIZES.items())
    group.add_argument(
        "--size", choices=SIZES, default="",
        help=f"what the pods that prepare, evaluate and export ask for: {sizes} ({default})",
    )  # fmt: skip
    for name in _SIZES:
        add_parameter(group, parameters.TABLE[name])


def add_form(parser: argparse.ArgumentParser) -> None:
    """Declare what of the pipeline is fixed when it is compiled."""
    group = parser.add_argument_group("the form of the pipeline", "Fixed when it is compiled.")
    group.add_argument(
        "--until", choices=[end for end in ENDS if end], default="",
        help="end there: `shards` makes the data ready and trains nothing",
    )  # fmt: skip
    group.add_argument(
        "--partitions", type=int, default=1, metavar="N",
        help="pods that share the download and the sharding of a big set, 1 to 256; the result is the same "
        "(default: %(default)s)",
    )  # fmt: skip
    add_limits(group)


def add_limits(group: "argparse._ActionsContainer") -> None:
    """Declare how long a run may take, and how long it is kept."""
    group.add_argument(
        "--deadline", type=int, default=0, metavar="SECONDS",
        help="end a run that takes longer (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--ttl", type=int, default=0, metavar="SECONDS",
        help="delete a run's pods and Workflow so long after its end (default: as the cluster is set up)",
    )  # fmt: skip


def access(options: argparse.Namespace) -> "Access":
    """Return where Kubeflow Pipelines is."""
    from pipelines.access import Access

    return Access.find(options.host, options.namespace, options.ca)


def connect(access: "Access") -> "Server":
    """Return the server that is to take a run, and warn where it is not the version that was tried.

    Raises:
        ConfigError: there is none, or it is too old.
        Unavailable: it does not answer.
    """
    from pipelines.kubeflow import Server, check_version

    server = Server(access)
    if warning := check_version(server.version()):
        print(f"warning: Kubeflow Pipelines: {warning}", file=sys.stderr)
    return server


def submission(
    options: argparse.Namespace, name: str, *, overrides: dict[str, Any] | None = None, **form: int
) -> "Submission":
    """Return what the options ask for, checked.

    Args:
        options: of `add_run`, and those that it was to leave out.
        name: of the run or schedule.
        overrides: what `read_recipe` has returned; None calls it.
        form: further fields of Submission.

    Raises:
        ConfigError: naming all that cannot be run.
    """
    from operations import retrain_condition
    from pipelines import sizes
    from pipelines.submission import Submission

    size = options.size or sizes.of_source(options.source or parameters.default("source"))
    overrides = read_recipe(options) if overrides is None else overrides
    # Some are of other forms than this command sends, and it has no options of theirs.
    values: dict[str, Any] = {name: getattr(options, name, None) for name in parameters.TABLE}
    values |= {"overrides": overrides, "job": _job(options.job)}
    values |= sizes.request(size, options.step_cpu or "", options.step_memory or "")
    retrain_condition.of_form(values)
    values = {name: value for name, value in values.items() if value not in (None, "", {})}
    request = Submission(
        name, options.experiment, values, partitions=options.partitions, until=options.until,
        deadline=options.deadline, ttl=options.ttl, **form,
    )  # fmt: skip
    request.check()
    return request


def _job(texts: list[str]) -> dict[str, Any]:
    """Read `field=value` texts as `kubedet job` does: what JobSpec says is text stays text."""
    from components.launchers.spec import JobSpec
    from pipelines.commands.job_options import set_field

    tree: dict[str, Any] = {}
    parse_overrides(texts, "--job")
    problems = [problem for text in texts for problem in set_field(tree, JobSpec, text)]
    if problems:
        raise ConfigError(
            "--job cannot be used:\n" + "\n".join(problems),
            fix="correct these; `kubedet job fields` says what each means",
        )
    return tree
