"""Which of several failures was the cause, and what is said of it."""

import json
import signal

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from trainer.base.errors import DataError, Interrupted
from trainer.launching.worker_failures import (
    ERROR_FILE,
    exit_code,
    explain,
    first_cause,
    is_lost_peer,
    is_retryable,
    report_error,
    report_lost_peer,
)

GLOO = RuntimeError(
    "[/build/gloo/transport/tcp/pair.cc:545] Connection closed by peer [10.0.0.1]:302. This is typical\nmore"
)


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """A worker's failure as torchrun sees it: its exit code, what it wrote, and when it was seen."""

    def make(code, write=None, error=None, later=0):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        monkeypatch.setenv(ERROR_FILE, str(path))
        if write:
            write(error)
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(path))
        failure.timestamp += later
        path.touch()
        return failure

    return make


def test_a_real_failure_wins_over_what_follows_from_it(failed):
    lost = failed(143, report_lost_peer, GLOO)
    interrupted = failed(143, report_error, Interrupted("stopped"))
    stopped = failed(-signal.SIGTERM)
    aborted = failed(-signal.SIGABRT)
    killed = failed(-signal.SIGKILL)
    crashed = failed(1, later=1)
    reported = failed(2, report_error, DataError("no images"), later=2)
    ranked = [reported, killed, crashed, aborted, interrupted, lost, stopped]
    for place in range(len(ranked)):
        failures = dict(reversed(list(enumerate(ranked[place:], start=place))))
        assert first_cause(failures) == (place, ranked[place])


def test_what_torchrun_killed_itself_was_not_the_cause(failed):
    aborted, deaf = failed(-signal.SIGABRT), failed(-signal.SIGKILL, later=30)
    assert first_cause({0: deaf, 1: aborted}) == (1, aborted)


@pytest.mark.parametrize(
    ("code", "ends", "again", "text"),
    [(1, 1, False, "traceback above"), (3, 3, False, "exit code 3"), (-9, 137, True, "out of memory"),
     (-11, 139, True, "died from SIGSEGV"), (143, 143, True, "exit code 143")],
)  # fmt: skip
def test_exit_codes_of_workers_without_a_message(code, ends, again, text, failed):
    failure = failed(code)
    assert (exit_code(failure), is_retryable(failure)) == (ends, again)
    assert text in explain(5, failure) and "rank 5" in explain(5, failure)


def test_a_lost_peer_is_worth_a_retry_and_said_in_a_sentence(failed):
    failure = failed(143, report_lost_peer, GLOO)
    assert exit_code(failure) == 143 and is_retryable(failure)
    assert explain(3, failure).splitlines()[0] == (
        "stopped: rank 3 lost another process of this run: Connection closed by peer [10.0.0.1]:302"
    )


def test_a_users_mistake_is_not(failed):
    failure = failed(2, report_error, DataError("no images", fix="add some"))
    assert exit_code(failure) == 2 and not is_retryable(failure)
    assert explain(0, failure) == "error: no images\n  fix: add some"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        (RuntimeError("NCCL error ... remote process exited or there was a network error"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), True),
        (dist.DistStoreError("wait timeout after 1800000ms"), True),
        (RuntimeError("CUDA out of memory"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), False),
    ],
)
def test_only_what_says_so_is_a_lost_peer(error, lost, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, "somewhere")
    assert is_lost_peer(error) is lost
    monkeypatch.delenv(ERROR_FILE)
    assert not is_lost_peer(error), "without torchrun there is no peer"


def test_outside_torchrun_an_error_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    report_error(DataError("no images"))
    assert capsys.readouterr().err == "error: no images\n"


def test_the_file_is_what_torchrun_reads(failed, tmp_path):
    failure = failed(2, report_error, DataError("no images"))
    assert failure.message == "no images" and failure.timestamp > 1e9
    assert json.loads((tmp_path / "0.json").read_text())["exit_code"] == 2
