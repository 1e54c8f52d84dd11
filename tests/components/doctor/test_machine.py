"""What `kubedet run` needs of this machine."""

import os
from types import SimpleNamespace

import pytest
import torch

from components.doctor import machine
from trainer.launching.doctor import Needs


def test_this_machine_can_run_the_tests_and_so_a_run(tmp_path):
    checks = {check.title: check for check in machine.check(Needs(output=str(tmp_path)))}
    assert checks["packages"].state == "ok"
    assert checks["output"].state == "ok"
    assert "RDMA devices" not in checks or checks["RDMA devices"].state == "ok"


def test_gpus_that_are_asked_for_must_be_there():
    states = {check.title: check.state for check in machine.check(Needs(gpus=4096))}
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
    real = machine.find_spec
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name in absent else real(name))
    checks = list(machine.check(Needs()))
    assert checks[0].state == "missing"
    assert checks[0].fix == fix
    assert ("shared memory" in {check.title for check in checks}) is ("torch" not in absent)


def test_versions_cores_memory_and_space_are_told(tmp_path):
    checks = {check.title: check for check in machine.check(Needs(output=str(tmp_path / "not" / "there")))}
    assert f"torch {torch.__version__.partition('+')[0]}" in checks["packages"].detail
    assert checks["machine"].detail.startswith(f"{len(os.sched_getaffinity(0))} cores, ")
    assert checks["disk"].detail.endswith(f" GiB free at {tmp_path}")


def test_no_gpu_is_no_fault_where_none_is_asked_for():
    (gpus,) = (check for check in machine.check(Needs()) if check.title == "GPUs")
    assert gpus.state == "ok"
    assert gpus.fix == "" and (torch.cuda.is_available() or "training is on the CPU" in gpus.detail)


@pytest.mark.parametrize(("kib", "state"), [(8 * 2**20, "ok"), (2**20, "warning")])
def test_little_memory_is_a_warning(tmp_path, kib, state):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {kib} kB\n")
    (check,) = (one for one in machine.check(Needs(), tmp_path) if one.title == "machine")
    assert check.state == state and f"{kib / 2**20:.1f} GiB" in check.detail
    assert bool(check.fix) is (state == "warning")


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**20))
    (disk,) = (check for check in machine.check(Needs(output=str(tmp_path))) if check.title == "disk")
    assert disk.state == "warning" and str(tmp_path) in disk.detail and "--output" in disk.fix
