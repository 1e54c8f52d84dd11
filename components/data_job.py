"""Download and sharding as a job of several nodes, with the launcher, queue and logs of a training job.

The job does all the work of the step. The step then runs itself, and finds everything finished.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from components import environment, launchers
from components.jobs import Request, check_folders
from components.launchers.spec import with_heartbeat
from trainer import storage
from trainer.base.errors import ConfigError

_TRAINING_FIELDS = (
    "cpu_request", "cpu_limit", "memory_request", "memory_limit", "gpu_resource", "resources",
    "shared_memory", "network", "capabilities", "node_selector", "spread", "elastic", "deadline",
)  # fmt: skip
"""Fields of a run's job that describe the nodes of the training."""


def check_workers(number: int) -> None:
    """Raise ConfigError if the number of workers is below 1."""
    if number < 1:
        raise ConfigError(f"data_workers {number} is below 1", fix="use 1 or more")


@dataclass(frozen=True)
class DataJob:
    """The parameters of a run for its data jobs (see `Request`)."""

    workers: int = 1  # Number of nodes; 1: the step's own pod does the work.
    launcher: str = launchers.DEFAULT
    job: Mapping[str, Any] = field(default_factory=dict)
    claim: str = ""
    credentials: str = environment.CREDENTIALS
    run_id: str = ""
    image: str = ""  # Image of the steps.
    cpu: str = ""  # Request of each node.
    memory: str = ""

    def make_launch(self, step: str, data_root: str) -> Callable[[tuple[str, ...]], None] | None:
        """Return a function that runs `python -m trainer` on all nodes; None for a single node."""
        check_workers(self.workers)
        if self.workers == 1:
            return None
        in_pods = launchers.in_pods(self.launcher)
        request = Request(
            launcher=self.launcher,
            nodes=self.workers if in_pods else 1,
            nproc=1 if in_pods else self.workers,
            job=self._fields() if in_pods else {},
            credentials=self.credentials,
            claim=self.claim,
            run_id=self.run_id,
            steps_image=self.image,
            step=step,
        )

        def launch(arguments: tuple[str, ...]) -> None:
            job = request.build_spec(arguments)
            if not in_pods:
                launchers.run(self.launcher, job)
                return
            from trainer.launching import heartbeat  # Imports Unix signals, which commands do not need.

            check_folders(job, data_root=data_root)
            beats = storage.join(data_root, "jobs", f"{job.name}.json")
            with heartbeat.renew_periodically(beats):
                launchers.run(self.launcher, with_heartbeat(job, beats))
            storage.delete(beats)

        return launch

    def _fields(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.job.items() if name not in _TRAINING_FIELDS}
        return {"cpu_request": self.cpu, "memory_request": self.memory} | kept
