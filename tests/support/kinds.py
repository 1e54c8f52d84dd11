"""Tests that mean every kind of job, and the names that its pods have.

@both
def test_something(run, simulated, first):
    simulated.lives[first] = endless
    assert f"[{first}] hello" in run()          # `run` takes made up words off the lines.
"""

import re

import pytest

from components.launchers.cluster.kinds import KINDS

both = pytest.mark.parametrize("kind", list(KINDS), indirect=True)
"""Mark of a test that is run for each kind."""


def pod_name(kind, rank, job="train"):
    """Name of a pod without what is made up of it: by it `lives` and `pod` of a FakeCluster know it."""
    if kind.name == "trainjob":
        return f"{job}-node-0-{rank}"
    return f"{job}-worker-{rank}"


def plain(text):
    """Take off what is made up of pods' names."""
    return re.sub(r"(-node-0-\d+)-[a-z0-9]{5}\b", r"\1", text)


def make_by_hand(simulated, kind, name):
    """Create a job as somebody else does; no pod is made."""
    simulated.asleep = {kind.plural}
    simulated.create_job("default", {**kind.probe(), "metadata": {"name": name}})
    simulated.asleep = set()
