"""Starts runs of the pipeline in Kubeflow Pipelines."""

import sys

from components import jobs, launchers
from components.launchers.spec import START_TIMEOUT
from pipelines import Access, preflight, wait
from pipelines.kubeflow import Server, check_version
from pipelines.submission import Submission


def connect(access: Access) -> Server:
    """Connect to the server, and print a warning if its version was not tested."""
    server = Server(Access.resolve(access.host, access.namespace, access.ca))
    if warning := check_version(server.version):
        print(f"warning: Kubeflow Pipelines: {warning}", file=sys.stderr)
    return server


def start_run(submission: Submission, server: Server) -> tuple[str, str]:
    """Check the cluster and start a run; return its id and its address in the UI."""
    preflight.check_submission(submission, server.namespace)
    experiment = server.find_or_create_experiment(submission.experiment)
    run_id = server.create_run(submission.name, experiment, submission.package(), {**submission.parameters})
    return run_id, server.link("runs", run_id)


def follow_run(submission: Submission, server: Server, run_id: str) -> None:
    """Print the states of a started run until it has ended (see `wait.follow_run`)."""
    compiled, job = submission.options, submission.parameters.get("job", {})
    try:
        wait.follow_run(
            server,
            run_id,
            deadline=compiled.deadline,
            conditional=compiled.conditional,
            start_timeout=job.get("start_timeout", START_TIMEOUT),
        )
    except KeyboardInterrupt:
        print(f"the run continues: {server.link('runs', run_id)}", file=sys.stderr)
        raise


def status_command(submission: Submission, server: Server, run_id: str) -> str:
    """Return the command that shows the training job of a run; empty if it has none."""
    compiled = submission.options
    if compiled.until or compiled.trials or not launchers.in_pods(submission.get("launcher")):
        return ""
    where = f" -n {server.namespace}" if server.namespace else ""
    return f"kubedet job status{where} {jobs.job_name(run_id)}"
