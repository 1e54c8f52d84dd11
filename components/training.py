"""Trains with a launcher: specifies the job, sends its heartbeat and reads its result."""

import logging
from contextlib import nullcontext

from components import launchers
from components.jobs import Request, check_folders
from components.launchers.spec import JobSpec, with_heartbeat
from trainer import storage
from trainer.base.errors import LaunchError
from trainer.launching import heartbeat
from trainer.steps import train as training
from trainer.steps.manifests import Shards, TrainedModel

logger = logging.getLogger(__name__)

_HEARTBEAT = "launcher.json"


def train(
    shards: Shards, request: Request, output: str = "", *, rules: str = "", warm_start: str = ""
) -> TrainedModel:
    """Start or resume a training run with a launcher, and wait for its end.

    `rules` are the gate's. See `trainer.steps.train` for `output` (`run_folder`) and `warm_start` (`train`).
    """
    in_pods = launchers.in_pods(request.launcher)
    folder = training.run_folder(output, shards, request.run_id)
    job = request.build_spec(training.worker_arguments(shards, folder))
    if in_pods:
        job = with_heartbeat(job, storage.join(folder, _HEARTBEAT))
        check_folders(job, data_root=shards.uri, output=folder)

    def launch() -> None:
        try:
            launchers.run(request.launcher, job)
        except LaunchError as error:
            if not storage.exists(training.result_uri(folder)):
                raise
            logger.warning("the training is complete, although its job failed: %s", error)

    # Start this first: a job of an earlier attempt needs the heartbeat.
    with heartbeat.renew_periodically(storage.join(folder, _HEARTBEAT)) if in_pods else nullcontext():
        return training.train(
            shards,
            folder,
            launch,
            processes=count_processes(job),
            rules=rules,
            warm_start=warm_start,
            run_id=request.run_id,
            image=job.image,
            in_pods=in_pods,
        )


def count_processes(job: JobSpec) -> tuple[int, int]:
    """Return the minimum and maximum number of a job's processes."""
    maximum = job.elastic.max_nodes if job.elastic else job.nodes
    return job.nodes * job.processes, maximum * job.processes
