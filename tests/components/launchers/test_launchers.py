"""The register of launchers."""

import pytest

import components.launchers as launchers
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

JOB = JobSpec(command=("true",), name="train", image="i:1")


@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_every_launcher_has_a_meaning_and_kinds_that_exist(name):
    entry = launchers.entry(name)
    assert entry.meaning and set(entry.kinds) <= set(KINDS)
    assert entry.pods is (name != "local")


@pytest.mark.parametrize("act", ["run", "remove"])
def test_one_that_does_not_exist_is_refused_with_the_list(act):
    with pytest.raises(ConfigError, match="no launcher 'slurm'") as error:
        getattr(launchers, act)("slurm", JOB)
    assert error.value.fix == "use one of: local, kubernetes, pytorchjob, trainjob"
