"""Injects faults where they are asked for (`pytest tests/faults -m faults`), and writes their table.

The table, build/faults.md, tells of each fault and stage how many were injected and held.
"""

import os
import random
from collections import defaultdict

import pytest
from fault_table import Results, table
from faulty_store import hurried, proxy
from prepared_data import Prepared

from tests.trainer.conftest import bucket, config, object_store_server
from tests.trainer.data.conftest import fifteen_images, make_coco, make_jpeg

__all__ = [
    "bucket",
    "config",
    "fifteen_images",
    "hurried",
    "make_coco",
    "make_jpeg",
    "object_store_server",
    "proxy",
]

_RESULTS: Results = defaultdict(list)


def pytest_collection_modifyitems(config, items):
    """Leave the suite out unless it is asked for: it takes minutes."""
    for item in items:
        for mark in item.iter_markers("faults"):
            item.user_properties += [("fault", [mark.args[0], stage]) for stage in mark.args[1]]
    if "faults" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("faults")])
        items[:] = [item for item in items if not item.get_closest_marker("faults")]


def pytest_runtest_logreport(report):
    """Note what became of a test, in the process that sees them all."""
    if report.when != "call" and report.outcome == "passed":
        return
    injected = sum(value for name, value in report.user_properties if name == "injected")
    for name, value in report.user_properties:
        if name == "fault":
            _RESULTS[tuple(value)].append((report.outcome, injected or 1))


def pytest_sessionfinish(session):
    if _RESULTS and not hasattr(session.config, "workerinput"):
        path = session.config.rootpath / "build" / "faults.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(table(_RESULTS))


@pytest.fixture
def injected(request):
    """Tell how many faults a test injects, where it is more than one."""

    def tell(count):
        request.node.user_properties.append(("injected", count))

    return tell


@pytest.fixture
def chance(request):
    """Random numbers of this run; KUBEDET_FAULTS_SEED repeats one."""
    seed = os.environ.get("KUBEDET_FAULTS_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"KUBEDET_FAULTS_SEED={seed}")  # Shown where the test fails.
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture
def prepared(fifteen_images, tmp_path):
    return Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"))
