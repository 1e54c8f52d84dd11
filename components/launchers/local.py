"""Training on this machine: torchrun as a child process."""

import itertools
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from components.launchers.process import GuardedProcess
from components.launchers.spec import JobSpec
from trainer.errors import EXIT_RETRY, ConfigError, Interrupted, LaunchError

_LAST_LINES = 20
_NO_MESSAGE = "To enable traceback see"  # What torchrun says of a worker that crashed.


def run(job: JobSpec) -> None:
    """Run a job on this machine to its end, its output on stdout.

    SIGTERM and SIGINT are passed on: the job saves its checkpoint and ends.

    Args:
        job: what to run, on one node.

    Raises:
        ConfigError: the job needs several nodes.
        LaunchError: it failed; the message holds its error or last lines, `exit_code` its code.
        Interrupted: it was stopped and goes on when it is run again.
    """
    if job.nodes != 1:
        raise ConfigError(
            f"launcher local runs on this machine alone, not on {job.nodes} nodes",
            fix="set nodes to 1, and nproc to the number of processes",
        )
    env = environment(job, cores=len(os.sched_getaffinity(0)))
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with (
        GuardedProcess(command(job), env=env, grace_seconds=job.grace_seconds) as process,
        _passing_on(process) as stopped,
    ):
        for line in process.lines():
            last.append(line)
            print(line, flush=True)
        code = process.wait()
    if stopped or code == EXIT_RETRY:
        raise Interrupted("the training was stopped", fix="run the same again: it goes on where it stopped")
    if code != 0:
        raise _failure(code, list(last))


def command(job: JobSpec) -> list[str]:
    """Return the program and arguments that start a job here."""
    launch = [sys.executable, "-m", "trainer", "launch", "--nproc", str(job.nproc), "--"]
    return [*launch, *job.arguments]


def environment(job: JobSpec, cores: int) -> dict[str, str]:
    """Return the environment of a job: this process's, the job's, and threads that share the cores.

    Without OMP_NUM_THREADS torchrun gives each process one thread, and PyTorch all cores to
    each: either way most of a CPU is lost. LOGLEVEL is torchrun's: it warns of every stop.
    """
    threads = str(max(1, cores // job.nproc))
    ours = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "LOGLEVEL": "ERROR"}
    return {**ours, **os.environ, **job.env}


@contextmanager
def _passing_on(process: GuardedProcess) -> Iterator[list[int]]:
    """Pass the first SIGTERM or SIGINT on to the process; yields the list that takes its number."""
    stopped: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not stopped:  # A second one would end the guard's patience with a checkpoint that is written.
            process.stop()
        stopped.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(code: int, lines: Sequence[str]) -> LaunchError:
    """Make an error of a failed job: its own message where it has one, else its last lines."""
    message = _message(lines)
    if message:
        error = LaunchError(message)
    else:
        why = f"was killed by signal {code - 128}" if code > 128 else f"failed with exit code {code}"
        error = LaunchError(
            f"the training {why}; its last lines:\n" + "\n".join(f"  {line}" for line in lines),
            fix="free memory, or make the batch smaller: the same again goes on" if code == 137 else "",
        )
    error.exit_code = code if code < 128 else LaunchError.exit_code
    return error


def _message(lines: Sequence[str]) -> str:
    """Return the last message `error: ...` with the indented lines that belong to it."""
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if not starts or _NO_MESSAGE in lines[starts[-1]]:
        return ""
    rest = itertools.takewhile(lambda line: line.startswith("  "), lines[starts[-1] + 1 :])
    return "\n".join([lines[starts[-1]].removeprefix("error: "), *rest])
