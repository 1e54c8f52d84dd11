"""What the doctor sees on a machine, real or made of files, and what it makes of it."""

import os
import resource
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.launching import machine_checks
from trainer.launching.machine_checks import check_local_machine, check_output, check_training_machine


def look(root=Path("/"), **needs):
    return {check.title: check for check in check_training_machine(**needs, root=root)}


@pytest.fixture
def machine(tmp_path):
    """A machine of files, with the given RDMA ports, and devices that may be used."""

    def make(ports=(), verbs=0, capabilities="0"):
        for name, state in ports:
            port = tmp_path / "sys/class/infiniband" / name / "ports" / "1"
            port.mkdir(parents=True)
            for file, text in (("state", state), ("link_layer", "Ethernet"), ("rate", "200 Gb/sec (4X HDR)")):
                (port / file).write_text(text + "\n")
        (tmp_path / "dev/shm").mkdir(parents=True)
        (tmp_path / "dev/infiniband").mkdir()
        for number in range(verbs):
            (tmp_path / f"dev/infiniband/uverbs{number}").write_text("")
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
        return tmp_path

    return make


@pytest.mark.parametrize(("limit", "state"), [(1024, "warning"), (2**20, "ok"), (-1, "ok")])
def test_low_limits_of_files_and_processes_are_a_warning(monkeypatch, limit, state):
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limit, limit))
    check = look()["limits"]
    assert check.state == state and ("nofile 65536, nproc 4096" in check.fix) is (state == "warning")


@pytest.mark.parametrize(
    ("ports", "verbs", "state", "detail"),
    [
        ((), 0, "missing", "none"),
        ((("mlx5_0", "1: DOWN"),), 1, "missing", "mlx5_0:1 DOWN Ethernet 200 Gb/sec (4X HDR)"),
        ((("mlx5_0", "4: ACTIVE"),), 0, "missing", "0 of 0 /dev/infiniband/uverbs*"),
        ((("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")), 2, "ok", "mlx5_1:1 ACTIVE Ethernet"),
    ],
)
def test_rdma_needs_an_active_port_and_a_device_file(ports, verbs, state, detail, machine):
    check = look(machine(ports, verbs), rdma=True)["RDMA devices"]
    assert check.state == state and detail in check.detail


@pytest.mark.parametrize(
    ("limit", "capabilities", "state"), [(8192, "0", "missing"), (8192, "4000", "ok"), (-1, "0", "ok")]
)
def test_locked_memory_is_limited_unless_the_process_may_lock(
    limit, capabilities, state, machine, monkeypatch
):
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert look(machine(capabilities=capabilities), rdma=True)["locked memory"].state == state


def test_the_output_is_written_to_and_left_as_it_was(tmp_path):
    assert check_output(str(tmp_path)).state == "ok"
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    check = check_output(str(tmp_path / "file" / "run"))
    assert check.state == "missing" and "Not a directory" in check.detail and check.fix


def test_the_exit_code_says_whether_something_is_missing(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(("ok       shared memory: ", "warning  shared memory: "))
    assert main(["doctor", "--gpus", "1000"]) == 1
    assert "missing  GPUs: 0 of 1000 required" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("absent", "system", "missing"),
    [
        ("torch", "Linux", ["packages"]),
        ("onnx", "Linux", ["packages"]),
        ("torch", "Windows", ["system", "packages"]),
    ],
)
def test_missing_packages_and_other_systems_have_a_remedy(monkeypatch, absent, system, missing):
    real = machine_checks.find_spec
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: None if name == absent else real(name))
    monkeypatch.setattr("platform.system", lambda: system)
    checks = list(check_local_machine())
    assert [check.title for check in checks if check.state == "missing"] == missing
    assert checks[len(missing) - 1].fix.endswith("'.[train]'")
    assert ("shared memory" in {check.title for check in checks}) is (absent != "torch")


@pytest.mark.parametrize(("kib", "state"), [(8 * 2**20, "ok"), (2**20, "warning")])
def test_little_memory_is_a_warning(tmp_path, kib, state):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {kib} kB\n")
    (check,) = (one for one in check_local_machine(root=tmp_path) if one.title == "machine")
    assert check.state == state and f"{kib / 2**20:.1f} GiB" in check.detail
    assert bool(check.fix) is (state == "warning")
