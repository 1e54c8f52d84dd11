"""SIGTERM and SIGINT as an exception in a launcher, so that it ends its job first, whatever it waits for."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import Interrupted, KubedetError
from trainer.stop_signals import handling


class StopRequest(BaseException):
    """A stop signal was received. Not an Exception: no handler of errors may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number).name


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise StopRequest at the first SIGTERM or SIGINT, whatever is waited for; further ones are ignored."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise StopRequest(number)

    with handling(handle):
        yield


def stopped() -> Interrupted:
    """Make the error of a launcher that was stopped, and whose job is deleted."""
    return Interrupted("the training was stopped", fix="run the same again: it goes on where it stopped")


def not_deleted(request: StopRequest, job: str, why: KubedetError, *, stop: str) -> Interrupted:
    """Make the error of a launcher that was stopped, and whose job could not be deleted.

    Args:
        request: the signal.
        job: the job's name.
        why: the error of its deletion.
        stop: the command that deletes it.
    """
    return Interrupted(
        f"{request.signal}, but the job {job} could not be deleted: {why.message}", fix=f"delete it: {stop}"
    )
