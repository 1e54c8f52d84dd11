"""What the tests of the pipeline share."""

import functools
import inspect
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_stacks():
    """Stacks without their source lines: looking for them among a test process's modules takes long.

    kfp asks for the whole stack, and reads one name in it, for each setting of each step.
    """
    with mock.patch.object(inspect, "stack", functools.partial(inspect.stack, context=0)):
        yield
