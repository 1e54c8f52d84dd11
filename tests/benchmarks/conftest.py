"""Benchmarks are run in the tests' own process, which spares the imports."""

import logging
import os

import pytest
import torch

from trainer.model import fused_functions


@pytest.fixture(autouse=True)
def as_before():
    environment, threads = dict(os.environ), torch.get_num_threads()
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    fused_functions.choose(False, torch.device("cpu"), tell=False)
