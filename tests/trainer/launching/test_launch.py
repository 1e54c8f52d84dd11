"""The launcher of a node: what it ends with, and what it says, whatever happens to the others."""

import os
import signal
import socket
import time

import pytest
from patience import until

from components.launchers import local
from components.launchers.spec import JobSpec
from trainer.base import worker_pool
from trainer.base.errors import ConfigError
from trainer.launching import launch as module
from trainer.launching.launch import launch
from trainer.trackers.training_log import read_rows
from trainer.training import checkpoint


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.usefixtures("impatient")
def test_a_node_that_lost_another_ends_with_143_and_both_resume(node, port, training):
    arguments, output = training
    place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    survivor, victim = (node(arguments(train__epochs=200), node_rank=rank, **place) for rank in (0, 1))
    until(lambda: any(row["step"] >= 4 for row in read_rows(output)), 240)
    victim.kill()
    assert survivor.wait() == 143, survivor.output
    assert "stopped: rank 0 lost another process of this run" in survivor.output
    assert "Traceback" not in survivor.output
    saved = checkpoint.read_latest(f"{output}/checkpoints")["step"]
    again = [node(arguments(train__epochs=saved // 6 + 1), node_rank=rank, **place) for rank in (0, 1)]
    assert [each.wait() for each in again] == [0, 0], again[0].output
    assert f"resumed at step {saved} of" in again[0].output


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.usefixtures("impatient")
def test_a_real_failure_on_one_node_is_its_own_and_the_other_lost_a_peer(node, port, training, tmp_path):
    """Rank 0 cannot write: a user's mistake ends the job, the other node's code does not hide it."""
    arguments, output = training
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    pair = [node(arguments(), node_rank=rank, **place) for rank in (0, 1)]
    assert [each.wait() for each in pair] == [2, 143], pair[0].output + pair[1].output
    assert f"error: cannot write {output}/metrics.jsonl" in pair[0].output
    assert "fix: this is a folder" in pair[0].output
    assert "Traceback" not in pair[0].output + pair[1].output


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_an_error_before_the_nodes_meet(node, port, training, tmp_path):
    arguments, output = training
    (tmp_path / "run").write_text("a file")
    alone = node(arguments(), nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port)
    assert alone.wait() == 2, alone.output
    assert f"error: the results cannot be written to {output}: cannot write {output}/" in alone.output
    assert "fix: a file is in the place of a folder" in alone.output
    assert "waiting for" not in alone.output and "Traceback" not in alone.output


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_nodes_that_do_not_meet_say_so_and_are_run_again(node, port):
    both = {"nnodes": 2, "rdzv_conf": "timeout=2"}
    alone = node(["train"], node_rank=0, master_addr="127.0.0.1", master_port=port, **both)
    elastic = node(
        ["train"], nnodes="2:3", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", rdzv_conf="join_timeout=2"
    )
    assert [each.wait() for each in (alone, elastic)] == [143, 143]
    assert f"2 nodes did not connect at 127.0.0.1:{port}: Timed out after" in alone.output
    assert "2 to 3 nodes did not connect at 127.0.0.1:0: some nodes did not arrive in time" in elastic.output
    for each in (alone, elastic):
        assert "fix: check that all of them run" in each.output
        assert "Traceback" not in each.output and "frame #" not in each.output


@pytest.mark.slow
def test_a_node_that_waits_for_others_stops_at_once(node, port):
    waiting = node(["train"], nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port)
    waiting.wait_for("waiting for 2 nodes")
    time.sleep(0.5)  # Now it is in the library's own wait, which Python's handlers do not end.
    waiting.process.send_signal(signal.SIGTERM)
    assert waiting.wait(60) == 143
    assert "stopped by SIGTERM" in waiting.output


@pytest.mark.slow
def test_a_port_that_is_taken_is_said(node):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        refused = node(["train"], nnodes=2, node_rank=0, master_addr="127.0.0.1", master_port=taken)
        assert refused.wait() == 1
    assert f"another program on this machine is listening at 127.0.0.1:{taken}" in refused.output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PET_NNODES", "3:2"),
        ("PET_NPROC_PER_NODE", "-2"),
        ("PET_RDZV_CONF", "timeout=long"),
        ("PET_RDZV_ENDPOINT", "here:x"),
    ],
)
def test_settings_that_torchrun_refuses(variable, value, monkeypatch):
    monkeypatch.setenv("PET_RDZV_BACKEND", "c10d")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="the processes cannot be started with these settings"):
        launch(["train"], [])


@pytest.mark.parametrize(
    ("processes", "cores", "set_by_user", "threads"),
    [("2", 8, None, "4"), ("3", 8, None, "2"), ("4", 2, None, "1"), ("1", 6, None, "6"), ("2", 8, "3", "3")],
)
def test_processes_share_the_cores_as_those_of_a_run_do(
    processes, cores, set_by_user, threads, monkeypatch, tmp_path
):
    monkeypatch.setattr(worker_pool, "available_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    job = JobSpec(command=("python", "-m", "trainer"), nproc=int(processes))
    of_a_run = local.build_environment(job)["OMP_NUM_THREADS"]
    config, _, _ = module._parse_settings(
        ["--nproc-per-node", processes, "-m", "trainer", "train"], str(tmp_path)
    )
    assert os.environ["OMP_NUM_THREADS"] == of_a_run == threads
    assert config.nproc_per_node == int(processes)
