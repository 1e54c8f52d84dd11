"""Random schedules of failures, each by a seed that repeats it.

    export KUBEDET_SEEDS=10000
    .venv/bin/python -m pytest -n 2 tests/components/launchers/cluster/test_failure_schedules.py

KUBEDET_SEEDS=4711:4712 with `pytest -s` runs one seed and shows its events. What fails and what must hold is
in tests/support/cluster/run.py.
"""

import logging
import os
from dataclasses import replace

import pytest
from cluster.run import Run

from components.launchers.cluster.backend import ClusterBackend
from trainer.launching.heartbeat import Watch

FIRST, _, END = os.environ.get("KUBEDET_SEEDS", "300").rpartition(":")
SEEDS = range(int(FIRST or 0), int(END))
PARTS = min(len(SEEDS), 20)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "")
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


def execute(seed):
    run = Run(seed)
    run.fail()
    run.execute()
    return run


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_of_failures_breaks_a_run(part):
    broken = {}
    for seed in SEEDS[part::PARTS]:
        run = execute(seed)
        if run.violations:
            broken[seed] = run.events
        if len(SEEDS) == 1:
            print("\n".join(run.events))
    listing = [line for seed, events in broken.items() for line in (f"seed {seed}", *events)]
    assert not broken, "\n".join([f"{len(broken)} seeds: {sorted(broken)}", *listing[:60]])


def leave_jobs(monkeypatch):
    """Neither the launcher nor the missing heartbeat ends a job."""
    monkeypatch.setattr(ClusterBackend, "withdraw", lambda *_, **__: None)
    monkeypatch.setattr(Watch, "poll", lambda _: 0.0)


def rename_jobs(monkeypatch):
    """A step that runs again gives its job a new name."""
    submit = ClusterBackend.submit

    def renamed(backend, job):
        attempt = os.environ["KFP_POD_NAME"].removeprefix("step-0")
        return submit(backend, replace(job, name="-".join(filter(None, [job.name, attempt]))))

    monkeypatch.setattr(ClusterBackend, "submit", renamed)


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [(leave_jobs, "a job outlives its run"), (rename_jobs, "the run has two jobs")],
)
def test_a_launcher_that_breaks_a_rule_is_found(monkeypatch, spoil, violation):
    spoil(monkeypatch)
    assert any(violation in execute(seed).violations for seed in range(100))
