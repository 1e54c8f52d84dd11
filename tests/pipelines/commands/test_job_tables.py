"""Jobs as tables, sentences and JSON."""

from datetime import UTC, datetime, timedelta

from components.launchers.backend import JobStatus, Phase, PodStatus
from pipelines.commands import job
from trainer.launching.job_status import AP, LOSS, SPEED, Progress

CREATED = f"{datetime.now(UTC) - timedelta(days=12, hours=4, minutes=9):%Y-%m-%dT%H:%M:%SZ}"
RUNS = PodStatus("big-master-0", "Running", 0, node="n1", restarts=2)
WAITS = PodStatus("big-worker-0", "Pending", 1, "ErrImagePull", "no such\n  image")
FAR = Progress(43, 725, {LOSS: 0.532, SPEED: 41.0, AP: 0.312})
BIG = JobStatus(
    "big", Phase.PENDING, "ErrImagePull", "no such\n  image", (WAITS, RUNS), CREATED, 2,
    kind="PyTorchJob", progress=FAR, queue="gpus",
)  # fmt: skip


def test_a_job_is_a_row_of_a_table():
    expected = ("big", "PyTorchJob", "pending", "43%", "1/2", "2", "12d4h", "ErrImagePull")
    assert job.job_row(BIG) == expected
    assert job.job_row(JobStatus("a", Phase.SUCCEEDED)) == ("a", "-", "succeeded", "-", "0/1", "0", "-", "-")


def test_the_status_of_a_job_lists_its_pods_by_rank():
    assert job.status_text(BIG).splitlines() == [
        "big  pending",
        f"created {CREATED}, 12d4h ago, on 2 nodes, a PyTorchJob, queue gpus",
        "43% done, about 12m5s to go; loss 0.532, images/s 41, AP 0.312",
        "",
        "RANK  POD           PHASE    RESTARTS  EXIT  NODE  REASON",
        "0     big-master-0  Running  2         -     n1    -",
        "1     big-worker-0  Pending  0         -     -     ErrImagePull",
        "",
        "big-worker-0: no such image",
    ]
