"""The error of a failed job: which pod it names, and how."""

import pytest

from components.launchers.backend import Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster.watch import culprit, of_job
from components.launchers.output import Hints
from trainer.base.errors import Interrupted, LaunchError


def pod(rank, code, *, reason="Error", ended="", phase="Failed", message=""):
    return PodStatus(f"pod-{rank}", phase, rank, reason=reason, exit_code=code, ended=ended, message=message)


def failure(*pods, last=None, **fields):
    status = JobStatus("train", Phase.FAILED, pods=pods, **fields)
    return of_job(status, last or {}, Hints(rdma=False))


@pytest.mark.parametrize(
    ("pods", "rank"),
    [
        ([pod(0, 143), pod(1, 1)], 1),
        ([pod(0, 137), pod(1, 1)], 1),
        ([pod(0, 143), pod(1, 137)], 1),
        ([pod(0, 1, ended="2026-01-01T00:00:05Z"), pod(1, 1, ended="2026-01-01T00:00:04Z")], 1),
        ([pod(0, 1), pod(1, 1)], 0),
        ([pod(0, 0, phase="Succeeded"), pod(1, 3)], 1),
    ],
)
def test_the_first_that_failed_by_itself_is_the_culprit(pods, rank):
    assert culprit(pods).rank == rank


def test_a_job_whose_pods_are_gone_is_reported_by_its_condition():
    error = failure(reason="PyTorchJobFailed", message="1 master replica(s) failed.")
    assert str(error) == "the job train failed: PyTorchJobFailed: 1 master replica(s) failed."
    assert "does not say why" in str(failure())


@pytest.mark.parametrize(
    ("code", "reason", "message", "exit_code"),
    [
        (1, "Error", "pod pod-0 (rank 0) failed with exit code 1", 1),
        (127, "ContainerCannotRun", "pod pod-0 (rank 0) failed with exit code 127 (ContainerCannotRun)", 127),
        (137, "OOMKilled", "pod pod-0 (rank 0) was killed by signal 9 (OOMKilled)", 1),
        (135, "Error", "pod pod-0 (rank 0) was killed by signal 7", 1),
        (None, "Evicted", "pod pod-0 (rank 0) failed (Evicted)", 1),
    ],
)
def test_an_end_is_reported(code, reason, message, exit_code):
    error = failure(pod(0, code, reason=reason))
    assert error.message == message
    assert isinstance(error, LaunchError) and error.exit_code == exit_code


def test_too_little_memory_has_a_remedy():
    assert "memory_limit" in failure(pod(0, 137, reason="OOMKilled")).fix
    assert "shared_memory" in failure(pod(0, 135)).fix
    assert failure(pod(0, 1)).fix == ""


def test_a_training_that_saved_and_stopped_can_continue():
    error = failure(pod(0, 143))
    assert isinstance(error, Interrupted) and error.exit_code == 143


def test_memory_is_reported_with_the_message_of_the_training():
    lines = ["error: the training process of rank 0 was killed (SIGKILL)", "  fix: mostly memory ran out"]
    error = failure(pod(0, 137, reason="OOMKilled"), last={"pod-0": lines})
    assert "(OOMKilled)" in error.message and "mostly memory ran out" in error.message
    assert "raise memory_limit" in error.fix


def test_a_pod_in_crash_loop_is_reported_with_its_last_end():
    before = Ending("OOMKilled", "", 137)
    waits = PodStatus("pod-0", "Running", 0, reason="CrashLoopBackOff", restarts=10, before=before)
    error = failure(waits)
    assert "was killed by signal 9 (OOMKilled)" in error.message and "raise memory_limit" in error.fix
