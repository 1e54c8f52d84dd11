"""Training on this machine: torchrun as a child process."""

import math
import os
import sys
from collections import deque
from types import FrameType

from components.launchers.guarded_process import GuardedProcess
from components.launchers.output import LAST_LINES, Hints, failure_message, indent_lines
from components.launchers.process_variables import ALLOCATOR, ALLOCATORS, EXPANDABLE
from components.launchers.spec import JobSpec
from trainer.base import events
from trainer.base.errors import EXIT_RETRY, ConfigError, Interrupted
from trainer.base.worker_pool import threads_per_process
from trainer.launching.stop_signals import signal_handler


def run(job: JobSpec) -> None:
    """Run a job of one node on this machine until it ends; print its output, and forward stop signals."""
    if job.nodes != 1:
        raise ConfigError(
            f"the launcher local runs on this machine only, not on {job.nodes} nodes",
            fix="set nodes to 1, and nproc to the number of processes",
        )
    if job.working_dir and not os.access(job.working_dir, os.X_OK):
        raise ConfigError(
            f"working_dir {job.working_dir} is not a folder on this machine that this user can access",
            fix="create it, or omit working_dir",
        )
    last: deque[str] = deque(maxlen=LAST_LINES)
    hints = Hints(rdma=False, pods=False)
    cwd, grace = job.working_dir or None, job.grace_seconds
    process = GuardedProcess(build_command(job), env=build_environment(job), cwd=cwd, grace_seconds=grace)
    stopped: list[int] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        if not stopped:  # A second stop would kill it while it writes a checkpoint.
            process.stop()
        stopped.append(number)

    with signal_handler(forward_signal), process:
        for line in process.lines():
            reported = events.parse(line)
            if reported is None or isinstance(reported, events.ProcessFailed):
                last.append(line)
            if reported:
                continue
            print(line, flush=True)
            if hint := hints.find_new(line):
                print(f"hint: {hint}", flush=True)
        code = process.wait()
    if stopped or code == EXIT_RETRY:
        raise Interrupted("the training was stopped", fix="run the same command again to continue")
    if code != 0:
        text, fix = failure_message(last), ""
        if not text:
            why = f"was killed by signal {code - 128}" if code > 128 else f"failed with exit code {code}"
            text = f"the training {why}; its last lines:\n{indent_lines(last)}"
            fix = (
                "free memory, or reduce the batch size, then run the same command again to continue"
                if code == 137
                else ""
            )
        raise hints.make_error(text, fix, code)


def build_command(job: JobSpec) -> list[str]:
    """Return the program and arguments that start a job on this machine."""
    program, *arguments = job.command
    return [sys.executable if program == "python" else program, *arguments]


def build_environment(job: JobSpec, cores: int = 0) -> dict[str, str]:
    """Return the environment of a job. Its processes share `cores` (0: all) for their threads."""
    threads = str(threads_per_process(job.processes, cores))
    # LOGLEVEL is for torchrun, which otherwise warns about every stop.
    defaults = {
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "LOGLEVEL": "ERROR",
        events.FILE: events.LOG,
    }
    chosen = {**os.environ, **job.env}
    # As in pods: by default torchrun kills 30 s after SIGTERM, regardless of the job's grace period.
    defaults["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(math.ceil(job.grace_seconds) - 5, 1))
    defaults |= {} if ALLOCATORS & chosen.keys() else {ALLOCATOR: EXPANDABLE}
    return {**defaults, **chosen, "PET_NPROC_PER_NODE": str(job.processes)}
