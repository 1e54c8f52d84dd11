"""What `kubedet run` needs of this machine."""

import pytest

from components.doctor import here
from trainer.doctor import Needs


def test_this_machine_can_run_the_tests_and_so_a_run(tmp_path):
    found = {check.title: check for check in here.check(Needs(output=str(tmp_path)))}
    assert found["packages"].state == "ok"
    assert found["output"].state == "ok"
    assert "RDMA devices" not in found or found["RDMA devices"].state == "ok"


def test_gpus_that_are_asked_for_must_be_there():
    states = {check.title: check.state for check in here.check(Needs(gpus=4096))}
    assert states["GPUs"] == "missing"
    assert "RDMA devices" in states


@pytest.mark.parametrize(
    ("absent", "fix"),
    [
        ({"kfp"}, "pip install 'kubedet[pipeline]'"),
        ({"kfp", "onnx"}, "pip install 'kubedet[pipeline,export]'"),
        ({"torch"}, "pip install 'kubedet'"),
    ],
)
def test_a_missing_package_names_the_extra_that_has_it(monkeypatch, absent, fix):
    real = here.find_spec
    monkeypatch.setattr(here, "find_spec", lambda name: None if name in absent else real(name))
    found = list(here.check(Needs()))
    assert found[0].state == "missing"
    assert found[0].fix == fix
    assert (len(found) == 1) is ("torch" in absent)
