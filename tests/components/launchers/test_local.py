"""The local launcher and its guard, with small programs instead of the training."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from components.launchers import local, run
from components.launchers.guarded_process import GuardedProcess
from components.launchers.output import Hints
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError, Interrupted, LaunchError


@pytest.fixture
def program(monkeypatch):
    """Let the launcher run a Python program instead of the training."""

    def use(code):
        monkeypatch.setattr(local, "build_command", lambda job: [sys.executable, "-c", code])
        return JobSpec(command=("program",), nproc=1, grace_seconds=5.0)

    return use


def alive(pid):
    try:
        # A zombie is dead: only its parent has not asked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_program_starts_in_its_folder(program, capfd, tmp_path):
    code = "import os; print(os.getcwd())"
    job = replace(program(code), working_dir=str(tmp_path))
    local.run(job)
    assert capfd.readouterr().out == f"{tmp_path}\n"
    with pytest.raises(ConfigError, match="working_dir /nowhere/at/all"):
        local.run(replace(job, working_dir="/nowhere/at/all"))


def test_a_gpus_memory_grows_in_one_piece(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    job = JobSpec(command=("program",))
    assert local.build_environment(job, cores=2)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    assert "PYTORCH_ALLOC_CONF" not in local.build_environment(job, cores=2)


def test_a_failure_keeps_its_own_message_and_code(program):
    job = program(
        "import sys; from trainer.base.events import ProcessFailed, emit; "
        "emit(ProcessFailed(message='no such thing\\n  fix: make one', exit_code=2)); sys.exit(2)"
    )
    with pytest.raises(LaunchError) as caught:
        local.run(job)
    assert caught.value.exit_code == 2 and "no such thing" in str(caught.value)


def test_a_failure_without_a_message_shows_the_last_lines(program):
    with pytest.raises(LaunchError) as caught:
        local.run(program("print('was here'); raise SystemExit(7)"))
    assert "exit code 7" in str(caught.value) and "was here" in str(caught.value)


def test_stopped_after_saving_is_interrupted(program):
    with pytest.raises(Interrupted) as caught:
        local.run(program("raise SystemExit(143)"))
    assert caught.value.exit_code == 143


def test_sigterm_is_passed_on(program, tmp_path):
    job = program(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(Interrupted):
        local.run(job)
    assert time.monotonic() - start < 30


def test_several_nodes_and_unknown_launchers_are_refused():
    with pytest.raises(ConfigError, match="2 nodes"):
        local.run(JobSpec(command=("program",), nodes=2))
    with pytest.raises(ConfigError, match="no launcher 'slurm'"):
        run("slurm", JobSpec(command=("program",)))


def test_no_orphans_when_the_parent_is_killed(tmp_path):
    grandchild = "import time; time.sleep(600)"
    child = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}')\n"
        "time.sleep(600)"
    )
    parent = (
        "import sys\nfrom components.launchers.guarded_process import GuardedProcess\n"
        f"with GuardedProcess([sys.executable, '-c', {child!r}], grace_seconds=1.0) as process:\n"
        "    list(process.lines())"
    )
    launcher = subprocess.Popen([sys.executable, "-c", parent])
    for _ in range(1200):
        if (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2:
            break
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    for _ in range(1200):
        if not any(map(alive, pids)):
            return
        time.sleep(0.05)
    pytest.fail(f"still running: {[pid for pid in pids if alive(pid)]}")


def test_a_stubborn_program_is_killed_after_its_grace():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code += "print('up', flush=True); time.sleep(60)"
    with GuardedProcess([sys.executable, "-c", code], grace_seconds=0.5) as process:
        lines = process.lines()
        assert next(lines) == "up"
        process.stop()
        assert process.wait() == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("worker:1:1 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed", "memlock"),
        ("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "IPC_LOCK"),
        ("ERROR: Unexpected bus error encountered in worker.", "shared_memory"),
        ("RuntimeError: unable to mmap 1048576 bytes from file </torch_1>", "shared_memory"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x", "shared_memory"),
        ("exitcode  : -7 (pid: 12)", "shared_memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "train.global_batch"),
        ("torch.AcceleratorError: CUDA error: out of memory", "expandable_segments"),
        (
            "[rank1]:[E1122 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 ms before timing out.",
            "waited too long for the others",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/out'", "fs_group"),
        ("NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", "network.hca"),
    ],
)
def test_a_line_has_its_hint_once(line, word):
    hints = Hints(rdma=True)
    assert word in hints.find_new(line)
    assert hints.find_new(line) == ""
    assert len(hints.hints) == 1


def test_sockets_are_well_where_rdma_was_not_asked_for():
    assert Hints(rdma=False).find_new("NCCL INFO Using network NET/Socket") == ""
