"""Options that several commands share, and the objects that they describe."""

import argparse
import sys
from typing import TYPE_CHECKING

from pipelines import Access, parameters
from pipelines.commands import option
from pipelines.parameters import SIZES, Parameter, Values
from trainer.config.parsing import parse_overrides
from trainer.model import recipes

if TYPE_CHECKING:
    from pipelines.kubeflow import Server
    from pipelines.submission import Submission

Options = argparse.Namespace
Group = argparse._ActionsContainer

BY_SOURCE = "default: small for sample, large for coco:2017 and openimages:, else medium"

_LARGE = ("coco:2017", "openimages:")  # Sources of more than a hundred thousand images.

_SIZES = ("step_cpu", "step_memory")  # Parameters that --size sets.


def add_overrides(parser: Group) -> None:
    """Declare --set."""
    option(
        parser,
        "--set KEY=VALUE...",
        "change one value of the configuration, e.g. train.lr=0.01; may be "
        "repeated; `kubedet recipes explain` lists the keys",
        dest="overrides",
    )


def read_recipe(options: Options) -> Values:
    """Return the overrides of a recipe file and of --set, which wins; replace the file by its recipe."""
    overrides = parse_overrides(options.overrides)
    if options.recipe is None:
        return overrides
    options.recipe, of_file = recipes.named(options.recipe)
    return of_file | overrides


def add_parameter(parser: Group, item: Parameter) -> None:
    """Declare the option of a parameter of the pipeline; its default is None."""
    option(parser, f"{item.option} {item.metavar}", item.help(), None, type=item.kind)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare the options for reaching Kubeflow Pipelines."""
    group = parser.add_argument_group(
        "Kubeflow Pipelines",
        "A token, if needed, is read from the variable KFP_EXISTING_TOKEN, as by kfp, or from the pod. "
        "Without a host: the cluster around this process, or that of the kubeconfig.",
    )
    option(group, "--host URL", "URL of its API (default: $KFP_ENDPOINT)")
    option(
        group,
        "--namespace NAME",
        "your profile's namespace, if several users share the installation (default: $KFP_NAMESPACE)",
    )
    option(group, "--ca FILE", "CA certificate of the host")


def add_run(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Declare the pipeline's parameters except for `without`, which the command sets."""
    group = parser.add_argument_group("parameters")
    for name, item in parameters.TABLE.items():
        if item.metavar and name not in (*_SIZES, *without):
            add_parameter(group, item)
    add_sizes(group, BY_SOURCE)
    add_overrides(group)
    option(
        group,
        "--job FIELD=VALUE...",
        "set one further field of the training job, e.g. memory_limit=64Gi or "
        "network.profile=rdma; may be repeated; `kubedet job fields` lists them",
    )
    option(group, "--experiment NAME", "experiment that contains the runs", "kubedet")


def add_sizes(group: Group, default: str) -> None:
    """Declare the resource requests of the heavy steps; `default` describes the default."""
    sizes = "; ".join(f"{name}: {cpu} cores, {memory}" for name, (cpu, memory) in SIZES.items())
    text = f"resource requests of the pods that prepare, evaluate and export: {sizes} ({default})"
    option(group, f"--size {'|'.join(SIZES)}", text)
    for name in _SIZES:
        add_parameter(group, parameters.TABLE[name])


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that are fixed when the pipeline is compiled."""
    group = parser.add_argument_group("compile options", "Fixed in the compiled pipeline.")
    text = "stop after this step: `shards` ends when the shards are written, without training"
    option(group, "--until UNTIL", text, choices=["shards"], metavar=None)
    add_limits(group)


def add_limits(group: Group) -> None:
    """Declare time limits of a run and of its objects."""
    option(group, "--deadline SECONDS", "end a run that takes longer (default: none)", 0)
    text = "delete a run's pods and Workflow this long after it ends (default: the cluster's setting)"
    option(group, "--ttl SECONDS", text, 0)


def connect(options: Options) -> "Server":
    """Return the server that the options of `add_access` name, and warn if it is not the tested version."""
    from pipelines.kubeflow import Server, check_version

    server = Server(Access.find(options.host, options.namespace, options.ca))
    if warning := check_version(server.version):
        print(f"warning: Kubeflow Pipelines: {warning}", file=sys.stderr)
    return server


def submission(
    options: Options, name: str, *, overrides: Values | None = None, **settings: int
) -> "Submission":
    """Return the run or schedule that `add_run` describes, checked; `settings`: further CompileOptions."""
    from components.launchers.job_options import read_fields
    from pipelines.submission import Submission

    job = read_fields(options.job)

    source = options.source or parameters.default("source")
    size = "large" if source.startswith(_LARGE) else "medium"
    if source == "sample" or source.startswith("sample:"):
        size = "small"
    cpu, memory = SIZES[options.size or size]
    overrides = read_recipe(options) if overrides is None else overrides
    # The command has no options for parameters of other compile options.
    values: Values = {name: getattr(options, name, None) for name in parameters.TABLE}
    values |= {"overrides": overrides, "job": job}
    values |= {"step_cpu": options.step_cpu or cpu, "step_memory": options.step_memory or memory}
    values = {name: value for name, value in values.items() if value not in (None, "", {})}
    if not values.get("min_new_images", 1):
        del values["min_new_images"]  # Only conditional pipelines have it.
    common = {name: getattr(options, name) for name in ("until", "deadline", "ttl")}
    request = Submission(name, options.experiment, values, common | settings)
    request.check()
    return request
