"""Runs many small tasks in threads or in spawned processes."""

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TypeVar

from trainer.base import die_with_parent
from trainer.base.daemon_threads import DaemonThreadPool
from trainer.base.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL_SECONDS = 0.5  # interval at which the main thread handles signals
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Return the cores of this process, limited by its affinity and its container's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_process(processes: int, cores: int = 0) -> int:
    """Return OMP_NUM_THREADS for processes that share `cores` cores (0: `available_cores`).

    torchrun sets it to 1 by default; without it, each process starts one thread per core.
    """
    return max(1, (cores or available_cores()) // max(processes, 1))


def run(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    *,
    processes: bool,
    max_pending: Callable[[], float] = lambda: math.inf,
) -> Iterator[Result]:
    """Yield the result of function(task) for each task as it finishes, in no fixed order.

    The workers are threads, or spawned processes that receive pickled functions and tasks. A single
    worker runs in this thread. Tasks are consumed as workers become free; at most `max_pending()` are in
    flight. After a task fails, pending tasks are cancelled.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    executor: Executor
    if processes:
        context = get_context("spawn")
        executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker)
    else:
        executor = DaemonThreadPool(workers)
    # `futures.wait` would scan all pending tasks each time.
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    pending = 0
    try:
        for task in tasks:
            with _without_main():
                executor.submit(function, task).add_done_callback(done.put)
            pending += 1
            while pending >= min(4 * workers, max(1.0, max_pending())):
                pending -= 1
                yield _next_result(done).result()
        for _ in range(pending):
            yield _next_result(done).result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, probably because memory ran out",
            fix="lower data.processes or add memory, and run again: finished parts are kept",
            transient=True,
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _next_result(done: "SimpleQueue[Future[Result]]") -> "Future[Result]":
    """Wait for a finished task; signals are handled during the wait."""
    while True:
        with suppress(Empty):
            return done.get(timeout=_POLL_SECONDS)


@contextmanager
def _without_main() -> Iterator[None]:
    """Prevent spawned workers from importing the caller's script, which may lack a `__main__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _init_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        die_with_parent.die_with_process(parent.sentinel)
