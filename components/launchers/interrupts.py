"""Signals that ask a launcher to end, as an exception: whatever it waits for, it ends its job first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import Interrupted, KubedetError
from trainer.stop_signals import handling


class Asked(BaseException):
    """Somebody asked this process to end. Not an Exception: nothing on the way may take it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number).name


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Raise Asked at the first SIGTERM or SIGINT, whatever is waited for; further ones mean nothing."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise Asked(number)

    with handling(handle):
        yield


def stopped() -> Interrupted:
    """Make the error of a launcher that was asked to end, and whose job is deleted."""
    return Interrupted("the training was stopped", fix="run the same again: it goes on where it stopped")


def not_deleted(asked: Asked, job: str, why: KubedetError, *, stop: str) -> Interrupted:
    """Make the error of a launcher that was asked to end, and whose job may still be there.

    Args:
        asked: the signal.
        job: the job's name.
        why: what its deletion met.
        stop: the command that deletes it.
    """
    return Interrupted(
        f"{asked.signal}, but the job {job} could not be deleted: {why.message}", fix=f"delete it: {stop}"
    )
