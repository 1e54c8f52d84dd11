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

from trainer.base import parent_watch
from trainer.base.daemon_threads import DaemonThreadPool
from trainer.base.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_LOOK = 0.5
"""Seconds between two looks at whether a signal came."""

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Return the cores this process may use: its affinity and its container's CPU limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_of_process(processes: int, cores: int = 0) -> int:
    """Return how many threads each of some processes computes with: together they take the cores once.

    Whoever starts processes sets OMP_NUM_THREADS to it, unless the user has: torchrun would give each one
    thread, and PyTorch all cores to each. Either way most of a CPU is lost, and sums round differently.

    Args:
        processes: of this machine.
        cores: to be shared; 0 takes `available_cores`.
    """
    return max(1, (cores or available_cores()) // max(processes, 1))


def run(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    *,
    processes: bool,
    most: Callable[[], float] = lambda: math.inf,
) -> Iterator[Result]:
    """Yield function(task) of each task as it is done, in no fixed order.

    Args:
        function: a module's function; with processes it, its tasks and results are pickled.
        tasks: taken as workers become free, so an endless supply takes no memory.
        workers: how many at the same time; 1 works in this thread.
        processes: use processes instead of threads. They are spawned, not forked: a fork would
            copy locks held by other threads, and the memory of the caller.
        most: returns how many tasks may be in flight as things are now, at least one.

    Raises:
        DataError: a worker process was killed.
        Exception: what a task raised; tasks not yet begun are dropped.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    executor: Executor
    if processes:
        context = get_context("spawn")
        executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    else:
        executor = DaemonThreadPool(workers)
    # A queue of finished tasks: `futures.wait` would scan all pending ones each time.
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    pending = 0
    try:
        for task in tasks:
            with _without_main():
                executor.submit(function, task).add_done_callback(done.put)
            pending += 1
            while pending >= min(4 * workers, max(1.0, most())):
                pending -= 1
                yield _next(done).result()
        for _ in range(pending):
            yield _next(done).result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, most likely for want of memory",
            fix="set data.processes lower or give more memory, and run again: finished pieces are kept",
            passing=True,
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _next(done: "SimpleQueue[Future[Result]]") -> "Future[Result]":
    """Return a finished task; signals are handled meanwhile, whichever thread receives them."""
    while True:
        with suppress(Empty):
            return done.get(timeout=_LOOK)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep workers that are spawned in this context from importing the caller's script.

    The script may lack the guard `if __name__ == "__main__"`, come from a pipe, or import much; no task
    needs it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it: idle workers do not notice its death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        parent_watch.end_with(parent.sentinel)
