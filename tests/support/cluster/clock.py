"""A clock that jumps: threads are greenlets, of which one runs until it waits, and then time moves on.

    clock = SimulatedClock()
    clock.start(work)       # Runs when the test itself waits.
    clock.sleep(3600)       # Takes no time.

Everything happens in one order, so a test that is repeated does the same. A `Process` has threads, signal
handlers and variables of its own, and can be killed.
"""

import heapq
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from math import inf

from greenlet import GreenletExit, getcurrent, greenlet

from trainer.base.clock import Clock
from trainer.launching.stop_signals import STOP_SIGNALS


class Process:
    """Threads that are stopped together."""

    def __init__(self, clock: "SimulatedClock", work: Callable[[], object], **environment: str) -> None:
        self._clock, self._environment = clock, environment
        self._handlers = dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL)
        self._pending: list[int] = []
        self.threads: list[greenlet] = []
        self.ended = self.signalled = False
        self.main = clock.start_in(self, self._run, work)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            self.kill()

    def enter(self) -> None:
        """Install what is this process's own."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.environ.update(self._environment)

    def leave(self) -> None:
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def signal(self, number: int) -> None:
        """Send a signal: its handler is called in the main thread, which may wait; without one it ends."""
        if not self.ended:
            self.signalled = True
            self._pending.append(number)
            self._clock.wake(self.main)

    def handle_signals(self) -> None:
        while self._pending and getcurrent() is self.main:
            number = self._pending.pop()
            handler = signal.getsignal(number)
            if not callable(handler):
                raise GreenletExit
            handler(number, None)

    def kill(self) -> None:
        """End all of its threads where they are."""
        self.ended = True
        with self._clock.inside(self):
            for thread in self.threads:
                if thread is not getcurrent() and not thread.dead:
                    thread.parent = getcurrent()
                    thread.throw()


class SimulatedClock(Clock):
    def __init__(self) -> None:
        self._time = 0.0
        self._waiting: list[list] = []  # A heap of [time, number, thread]; without a thread it is void.
        self._numbers = itertools.count()
        self._hub = greenlet(self._loop)
        self._owners: dict[greenlet, Process] = {}
        self._entries: dict[greenlet, list] = {}
        self._active: Process | None = None
        self._own_handlers: dict = {}

    def monotonic(self) -> float:
        return self._time

    def now(self) -> datetime:
        return datetime(2026, 11, 28, tzinfo=UTC) + timedelta(seconds=self._time)

    def sleep(self, seconds: float) -> None:
        end = self._time + max(0.0, seconds)
        self._wait_until(end)
        while self._time < end:  # A signal was handled.
            self._wait_until(end)

    def start(self, work: Callable[..., object], *arguments: object) -> greenlet:
        """Call `work` in a thread of the present process."""
        return self.start_in(self.process, work, *arguments)

    def start_in(self, process: Process | None, work: Callable[..., object], *arguments: object) -> greenlet:
        thread = greenlet(lambda: work(*arguments), parent=self._hub)
        if process:
            process.threads.append(thread)
            self._owners[thread] = process
        self._schedule(self._time, thread)
        return thread

    def condition(self) -> "_Condition":
        return _Condition(self)

    @property
    def process(self) -> Process | None:
        """The process whose thread is running; None for the test and the cluster."""
        return self._owners.get(getcurrent())

    def until(self, holds: Callable[[], object], seconds: float = 3600.0, step: float = 0.05) -> None:
        """Wait until something holds."""
        end = self._time + seconds
        while not holds():
            assert self._time < end, "waited in vain"
            self.sleep(step)

    def wake(self, thread: greenlet) -> None:
        """Let a thread that waits go on now."""
        if entry := self._entries.get(thread):
            entry[2] = None
            self._schedule(self._time, thread)

    def _schedule(self, time: float, thread: greenlet) -> None:
        self._entries[thread] = entry = [time, next(self._numbers), thread]
        heapq.heappush(self._waiting, entry)

    def _wait_until(self, time: float) -> None:
        thread = getcurrent()
        process = self._owners.get(thread)
        if process and process.ended:
            raise GreenletExit
        self._schedule(time, thread)
        self._hub.switch()
        if process:
            process.handle_signals()

    def _loop(self) -> None:
        while True:
            time, _, thread = heapq.heappop(self._waiting)
            assert time < inf, "all threads wait for each other"
            if thread is None or thread.dead:
                continue
            self._time = max(self._time, time)
            self._entries.pop(thread, None)
            self._change_to(self._owners.get(thread))
            thread.switch()

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        before = self._active
        self._change_to(process)
        yield
        self._change_to(before)

    def _change_to(self, process: Process | None) -> None:
        if process is self._active:
            return
        if self._active is None:
            self._own_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        elif not self._active.ended:
            self._active.leave()
        self._active = process
        if process is None:
            for number, handler in self._own_handlers.items():
                signal.signal(number, handler)
        else:
            process.enter()


class _Condition:
    """What of `threading.Condition` the launchers use; nobody else runs while its block does not wait."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._waiters: list[greenlet] = []

    def __enter__(self) -> "_Condition":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        end = self._clock.monotonic() + (inf if timeout is None else timeout)
        while not (result := predicate()) and self._clock.monotonic() < end:
            self._waiters.append(getcurrent())
            self._clock._wait_until(end)
        return result

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for thread in waiters:
            self._clock.wake(thread)
