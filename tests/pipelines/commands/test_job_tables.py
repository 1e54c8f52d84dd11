"""Jobs as tables, sentences and JSON."""

from datetime import UTC, datetime, timedelta

import pytest

from components.launchers.backend import JobStatus, Phase, PodStatus
from pipelines.commands import job
from trainer.launching.job_status import AP, LOSS, SPEED, Progress

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def ago(**time):
    return f"{NOW - timedelta(**time):%Y-%m-%dT%H:%M:%SZ}"


RUNS = PodStatus("big-master-0", "Running", 0, node="n1", restarts=2)
WAITS = PodStatus("big-worker-0", "Pending", 1, "ErrImagePull", "no such\n  image")
FAR = Progress(43, 725, {LOSS: 0.532, SPEED: 41.0, AP: 0.312})
BIG = JobStatus(
    "big", Phase.PENDING, "ErrImagePull", "no such\n  image", (WAITS, RUNS), ago(minutes=3), 2,
    kind="PyTorchJob", progress=FAR, queue="gpus",
)  # fmt: skip
OLD = JobStatus("older-than-that", Phase.SUCCEEDED, created=ago(days=12, hours=4))


def test_jobs_are_aligned_and_the_newest_is_first():
    assert job.jobs_table([OLD, BIG], NOW).splitlines() == [
        "NAME             KIND        PHASE      DONE  PODS  RESTARTS  AGE    REASON",
        "big              PyTorchJob  pending    43%   1/2   2         3m     ErrImagePull",
        "older-than-that  -           succeeded  -     0/1   0         12d4h  -",
    ]


def test_the_status_of_a_job_lists_its_pods_by_rank():
    assert job.status_text(BIG, now=NOW).splitlines() == [
        "big  pending",
        "created 2026-01-01T23:57:00Z, 3m ago, on 2 nodes, a PyTorchJob, queue gpus",
        "43% done, about 12m5s to go; loss 0.532, images/s 41, AP 0.312",
        "",
        "RANK  POD           PHASE    RESTARTS  EXIT  NODE  REASON",
        "0     big-master-0  Running  2         -     n1    -",
        "1     big-worker-0  Pending  0         -     -     ErrImagePull",
        "",
        "big-worker-0: no such image",
    ]


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ({"seconds": 60}, "1m"),
        ({"seconds": 192}, "3m12s"),
        ({"hours": 5, "minutes": 2, "seconds": 9}, "5h2m"),
        ({"days": 1, "minutes": 5}, "1d"),
        ({"seconds": -5}, "0s"),
    ],
)
def test_an_age_has_two_units(time, text):
    assert job.age(ago(**time), NOW) == text
