"""Waiting for what a thread or a process does."""

import time


def until(condition, seconds=60.0):
    """Ask until the answer counts; a busy machine takes its time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
