"""`kubedet submit`: one run of the pipeline in a cluster."""

import argparse
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import Access, parameters
from pipelines.commands import Commands, option, options

if TYPE_CHECKING:
    from pipelines.submission import Submission


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "submit",
        description="Compile the pipeline and start a run of it in Kubeflow Pipelines. With --wait the exit "
        "code is 1 if the run fails.",
    )
    option(parser, "--name NAME", "name of the run (default: the recipe and the time)")
    add_sending(parser)
    options.add_run(parser)
    options.add_compile_options(parser)
    options.add_access(parser)
    parser.set_defaults(command=_submit)


def add_sending(parser: options.Group) -> None:
    """Declare --wait and --dry-run."""
    option(parser, "--wait", "follow the run to its end")
    option(parser, "--dry-run", "print what would be sent, and send nothing")


def _submit(arguments: argparse.Namespace) -> int:
    recipe = Path(arguments.recipe or parameters.default("recipe")).stem
    name = arguments.name or f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    return send(arguments, options.submission(arguments, name))


def send(arguments: argparse.Namespace, submission: "Submission") -> int:
    """Start a run, or print what would be sent; returns the exit code.

    `arguments` are those of `add_sending` and `options.add_access`.
    """
    access = Access.find(arguments.host, arguments.namespace, arguments.ca)
    compiled = submission.options
    if arguments.dry_run:
        print("nothing is sent; this would be:")
        _describe(submission, access)
        return 0
    from components import jobs, launchers
    from pipelines import wait

    server = options.connect(arguments)
    secret = submission.parameters.get("credentials", "")
    if secret and (namespace := wait.Pods("", server.namespace).without_secret(secret)):
        missing = f"there is no Secret {secret} in namespace {namespace}: the run gets no keys from it"
        print(f"warning: {missing}", file=sys.stderr)
    experiment = server.experiment(submission.experiment)
    run_id = server.create_run(submission.name, experiment, submission.package(), {**submission.parameters})
    link = server.link("runs", run_id)
    _describe(submission, access)
    print(f"run {run_id}\n{link}")
    launcher = launchers.entry(submission.parameters.get("launcher", parameters.default("launcher")))
    if not (compiled.until or compiled.trials) and launcher.pods:
        where = f" -n {server.namespace}" if server.namespace else ""
        print(f"its training, when the data is ready: kubedet job status{where} {jobs.name_of(run_id)}")
    sys.stdout.flush()
    if arguments.wait:
        try:
            wait.follow(
                server, run_id, deadline=compiled.deadline, conditional=compiled.conditional, secret=secret
            )
        except KeyboardInterrupt:
            print(f"the run continues: {link}", file=sys.stderr)
            raise
    return 0


def _describe(submission: "Submission", access: Access) -> None:
    from components.images import COMPONENT_IMAGE
    from pipelines.submission import argument

    print(f"  host        {access.host or 'the cluster of this pod or kubeconfig'}")
    print(f"  namespace   {access.namespace or '(the default one)'}")
    print(f"  experiment  {submission.experiment}")
    print(f"  run         {submission.name}")
    own = "" if os.environ.get("KUBEDET_IMAGE") else "  (KUBEDET_IMAGE names another, e.g. your registry's)"
    print(f"  image       {COMPONENT_IMAGE}{own}")
    for parameter, value in submission.parameters.items():
        print(f"  {parameter}={argument(value)}")
    print("the same with kfp:")
    print("".join(f"  {line}\n" for line in submission.commands(access)), end="", flush=True)
