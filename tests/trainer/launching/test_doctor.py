"""What the doctor sees on a machine, real or made of files, and what it makes of it."""

import json
import os
import socket

import pytest

from trainer.__main__ import main
from trainer.base.errors import ConfigError
from trainer.launching.doctor import Needs, addresses, examine, size


def look(root=None, **needs):
    checks = examine(Needs(**needs), *([root] if root else []))
    return {check.title: check for check in checks}


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


def test_this_machine_lacks_nothing_that_is_not_asked_for():
    checks = look()
    assert list(checks) == ["shared memory", "network interfaces", "GPUs", "locked memory", "RDMA devices"]
    assert all(check.state in ("ok", "warning") for check in checks.values())
    assert all(bool(check.fix) == (check.state == "warning") for check in checks.values())


def test_what_is_asked_for_and_not_there_is_missing():
    checks = look(gpus=1000, interface="nosuch0", shared_memory=2**60)
    for title, seen in (
        ("GPUs", "of 1000 asked for"),
        ("network interfaces", "nosuch0 asked for"),
        ("shared memory", "asked for"),
    ):
        assert checks[title].state == "missing" and checks[title].fix and seen in checks[title].detail


def test_addresses_are_this_machines():
    by_interface = addresses()
    assert set(by_interface) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in by_interface["lo"]
    assert look(interface="lo")["network interfaces"].state == "ok"


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
    ("limit", "capabilities", "state"),
    [(8192, "0", "missing"), (8192, "4000", "ok"), (-1, "0", "ok")],
)
def test_locked_memory_is_limited_unless_the_process_may_lock(
    limit, capabilities, state, machine, monkeypatch
):
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert look(machine(capabilities=capabilities), rdma=True)["locked memory"].state == state


def test_the_output_is_written_to_and_left_as_it_was(tmp_path):
    assert look(output=str(tmp_path))["output"].state == "ok"
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    check = look(output=str(tmp_path / "file" / "run"))["output"]
    assert check.state == "missing" and "Not a directory" in check.detail and check.fix


def test_amounts_of_memory():
    assert (size("8Gi"), size("64M"), size("1.5Ki"), size("0")) == (2**33, 64_000_000, 1536, 0)
    with pytest.raises(ConfigError, match="'8GB' is not an amount of memory"):
        size("8GB")


def test_the_command_says_it_in_lines_or_json_and_by_its_code(capsys):
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(("ok       shared memory: ", "warning  shared memory: "))
    assert main(["doctor", "--gpus", "1000", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert {check["title"]: check["state"] for check in checks}["GPUs"] == "missing"
    assert set(checks[0]) == {"title", "state", "detail", "fix"}


def test_a_users_mistake_is_one_message(capsys):
    assert main(["doctor", "--shared-memory", "much"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: 'much' is not an amount")
