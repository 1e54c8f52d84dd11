import math
import os

import pytest

from trainer.base import worker_pool
from trainer.base.errors import DataError


@pytest.mark.parametrize(("workers", "processes"), [(1, False), (1, True), (4, False), (2, True)])
def test_every_task_gives_its_result(workers, processes):
    results = sorted(worker_pool.run(math.sqrt, range(100), workers, processes=processes))
    assert results == [math.sqrt(number) for number in range(100)]


def test_tasks_are_taken_as_workers_become_free():
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield number

    results = worker_pool.run(abs, tasks(), 2, processes=False)
    next(results)
    assert len(taken) <= 16
    results.close()


@pytest.mark.parametrize(("workers", "processes"), [(1, False), (3, False), (2, True)])
def test_what_a_task_raises_ends_it(workers, processes):
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        list(worker_pool.run(math.sqrt, [1, -1, 1], workers, processes=processes))


def test_a_worker_that_dies_is_told_of():
    with pytest.raises(DataError, match="a worker process was killed") as caught:
        list(worker_pool.run(os._exit, [3, 3], 2, processes=True))
    assert "data.processes" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("?", 8), (None, 8)]
)
def test_a_container_limit_counts(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(worker_pool, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert worker_pool.available_cores() == expected
