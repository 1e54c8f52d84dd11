"""Random schedules of failures, each by a seed that repeats it.

    export KUBEDET_SEEDS=10000
    .venv/bin/python -m pytest -n 2 tests/components/launchers/cluster/test_failure_schedules.py

KUBEDET_SEEDS=4711:4712 with `pytest -s` runs one seed and shows its events. What fails and what must hold is
in tests/support/cluster/run.py.
"""

import logging
import os

import pytest
from cluster.run import Run

FIRST, _, END = os.environ.get("KUBEDET_SEEDS", "300").rpartition(":")
SEEDS = range(int(FIRST or 0), int(END))
PARTS = min(len(SEEDS), 20)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_of_failures_breaks_a_run(part, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "")
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    broken = {}
    for seed in SEEDS[part::PARTS]:
        run = Run(seed)
        run.fail()
        run.execute()
        if run.violations:
            broken[seed] = run.events
        if len(SEEDS) == 1:
            print("\n".join(run.events))
    listing = [line for seed, events in broken.items() for line in (f"seed {seed}", *events)]
    assert not broken, "\n".join([f"{len(broken)} seeds: {sorted(broken)}", *listing[:60]])
