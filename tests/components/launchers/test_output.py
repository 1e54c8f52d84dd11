"""Hints on the cluster's settings from lines of a log."""

import pytest

from components.launchers.output import Hints


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("worker:1:1 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed", "memlock"),
        ("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "IPC_LOCK"),
        ("ERROR: Unexpected bus error encountered in worker.", "shared_memory"),
        ("RuntimeError: unable to mmap 1048576 bytes from file </torch_1>", "shared_memory"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x", "shared_memory"),
        ("exitcode  : -7 (pid: 12)", "shared_memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "train.accumulate"),
        ("torch.AcceleratorError: CUDA error: out of memory", "expandable_segments"),
        (
            "[rank1]:[E1122 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 ms before timing out.",
            "waited for the others",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/out'", "fs_group"),
        ("NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", "network.hca"),
    ],
)
def test_a_line_has_its_hint_once(line, word):
    hints = Hints(rdma=True)
    assert word in hints.line(line)
    assert hints.line(line) == ""
    assert len(hints.hints) == 1


def test_sockets_are_well_where_rdma_was_not_asked_for():
    assert Hints(rdma=False).line("NCCL INFO Using network NET/Socket") == ""
