"""`kubedet job`, against a simulated cluster."""

import json
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cluster.kueue import Kueue
from cluster.pods import endless
from event_lines import failed
from kinds import plain, pod_name
from patience import until
from terminal import Terminal

from components.launchers.backend import JobStatus, Phase, PodStatus
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec
from kubedet.display import jobs as display
from pipelines import jobs
from trainer.launching.job_status import AP, LOSS, SPEED, TrainingProgress


@pytest.fixture
def submit(kubedet, served_cluster):
    """Submits a job whose pods have a life, and whose other options may be given."""

    def submit(name, life=endless, *words):
        served_cluster.lives |= {f"{name}-worker-{number}": life for number in range(2)}
        return kubedet("job", "submit", "--name", name, "--image", "i:1", *words, "--", "true")

    return submit


def fails(pod):
    pod.run()
    pod.say("loading", failed("the loss is nan\n  fix: lower train.lr"))
    pod.exit(3)


def test_submit_sends_the_job_and_says_what_to_do_next(kubedet, served_cluster):
    words = ["-n", "team", "--name", "big", "--image", "i:1", "--nodes", 2, "--", "train", "--", "-x"]
    code, out, _ = kubedet("job", "submit", *words)
    assert code == 0
    assert "kubedet job status -n team big" in out
    container = served_cluster.job("big", "team")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert container["containers"][0]["command"] == ["train", "--", "-x"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_running_job_is_listed_entered_and_stopped(kubedet, served_cluster, kind):
    served_cluster.installed = {each.plural for each in KINDS.values()}
    ranks = [pod_name(kind, rank) for rank in (0, 1)]
    served_cluster.lives |= dict.fromkeys(ranks, endless)

    def run(verb, *words):
        return kubedet("job", verb, "--backend", kind.name, *words)

    assert run("submit", "--name", "train", "--image", "i:1", "--nodes", 2, "--", "true")[0] == 0
    until(lambda: all(pod and pod.containers[0] for pod in map(served_cluster.pod, ranks)))
    row = run("list")[1].splitlines()[1].split()
    assert row[:3] == ["train", kind.title, "running"] and "2/2" in row
    (status,) = json.loads(run("list", "--json")[1])
    assert (status["kind"], [pod["rank"] for pod in status["pods"]]) == (kind.title, [0, 1])
    assert plain(run("logs", "train")[1]) == f"{ranks[0]}: hello from {ranks[0]}\n"
    assert plain(run("logs", "train", "--rank", 1)[1]) == f"hello from {ranks[1]}\n"
    assert run("exec", "train", "--rank", 1, "--", "sh", "-c", "echo $0; exit 5", "x")[:2] == (5, "x\n")
    ((name, containers, _),) = served_cluster.executed
    assert plain(name) == ranks[1] and containers == [served_cluster.pod(ranks[1]).container]
    assert run("stop", "train")[1] == "deleted train and its pods\n"
    assert not [key for key in served_cluster.objects if key[0] in ("pods", "trainingruntimes")]


def test_submit_and_wait_shows_the_log_and_ends_as_the_job_did(submit):
    code, out, _ = submit("good", lambda pod: (pod.run(), pod.say("epoch 1"), pod.exit(0)), "--wait")
    assert code == 0
    assert "epoch 1" in out
    code, _, err = submit("bad", fails, "--wait")
    assert code == 3
    assert "the loss is nan" in err


def test_status_shows_pods_and_says_what_holds_them_back(kubedet, submit, served_cluster):
    submit("stuck", lambda pod: (pod.unschedulable("0/3 nodes have nvidia.com/gpu"), pod.sleep(60)))
    until(lambda: served_cluster.pod("stuck-worker-0").body["status"].get("conditions"))
    code, out, _ = kubedet("job", "status", "stuck")
    assert code == 0
    assert out.splitlines()[0] == "stuck  pending"
    assert "stuck-worker-0  Pending" in out
    assert "0/3 nodes have nvidia.com/gpu" in out
    assert "FailedScheduling (x7)" in out and "fix: " in out


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_missing_job_is_an_error(kubedet, verb):
    code, _, err = kubedet("job", verb, "none")
    assert code == 2
    assert err == "error: namespace default has no job 'none'\n  fix: see `kubedet job list -n default`\n"


def test_the_log_of_one_pod(kubedet, submit, served_cluster):
    submit("two", endless, "--nodes", 2)
    until(lambda: len(served_cluster.pod("two-worker-1").containers[0]) == 1)
    assert kubedet("job", "logs", "--pod", "two-worker-1", "two")[1] == "hello from two-worker-1\n"
    said = kubedet("job", "logs", "two", "--rank", 5)[2]
    assert "two has no pod of rank 5\n  fix: use one of these: two-worker-0, two-worker-1" in said


def test_status_shows_the_error_of_a_failed_job(kubedet, submit, served_cluster):
    submit("bad", fails)
    until(lambda: kubedet("job", "status", "bad")[1].startswith("bad  failed"))
    out = kubedet("job", "status", "bad")[1]
    assert "exit code 3: the loss is nan" in out and "fix: lower train.lr" in out


def test_the_status_of_a_job_that_kueue_does_not_serve_has_a_remedy(kubedet, submit, served_cluster):
    Kueue(served_cluster, serves=())
    submit("a", endless, "--backend", "pytorchjob", "--set", "kueue_queue=gpus")
    assert "fix: " not in kubedet("job", "status", "a")[1]  # It is there since a moment.
    served_cluster.job("a")["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    out = kubedet("job", "status", "a")[1]
    assert "a: in queue gpus: Kueue has no Workload for it" in out
    assert "fix: name kubeflow.org/pytorchjob in integrations.frameworks" in out


def test_without_a_cluster_the_message_says_what_to_set(kubedet, monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = kubedet("job", "list")
    assert code == 2
    assert "KUBECONFIG" in err
    assert "Traceback" not in err


MENU = [sys.executable, "-m", "kubedet.cli", "job", "menu"]


@pytest.mark.slow
def test_jobs_are_handled_by_keys(served_cluster, tmp_path):
    name = "kubedet-0123456789ab-train"
    served_cluster.lives[f"{name}-worker-0"] = endless
    ClusterBackend.connect().submit(JobSpec(name=name, image="i:1", command=("true",)))
    with Terminal(MENU, served_cluster.environment | {"HOME": str(tmp_path)}, (40, 80)) as terminal:
        terminal.until(f"{name} ")  # In full, in 80 columns.
        terminal.until("q quit")
        terminal.type("x 7\r")
        terminal.until("number of a job")
        terminal.type("i 1\r")
        terminal.until(f"{name}-worker-0")
        terminal.type("l 1\r")
        terminal.until(f"hello from {name}-worker-0")
        terminal.type("\x03")
        terminal.until("q quit")
        terminal.type("e 1\r")
        terminal.type("echo by$((1+1)); exit\r")
        terminal.until("by2")
        terminal.until("q quit")
        terminal.type("d 1\r")
        terminal.until("[y/n]")
        terminal.type("y\r")
        terminal.until(f"deleted {name}")
        terminal.type(f"s {tmp_path / 'none.yaml'}\r")
        terminal.until("cannot read the specification")
        terminal.type("q\r")
    assert ClusterBackend.connect().list_jobs() == []


def test_a_menu_needs_a_terminal(kubedet):
    assert "needs a terminal" in kubedet("job", "menu")[2]


CREATED = f"{datetime.now(UTC) - timedelta(days=12, hours=4, minutes=9):%Y-%m-%dT%H:%M:%SZ}"
RUNS = PodStatus("big-worker-0", "Running", 0, node="n1", restarts=2)
WAITS = PodStatus("big-worker-1", "Pending", 1, "ErrImagePull", "no such\n  image")
FAR = TrainingProgress(43, 725, {LOSS: 0.532, SPEED: 41.0, AP: 0.312})
BIG = JobStatus(
    "big",
    Phase.PENDING,
    "ErrImagePull",
    "no such\n  image",
    (WAITS, RUNS),
    CREATED,
    2,
    kind="PyTorchJob",
    progress=FAR,
    queue="gpus",
)


def test_a_job_is_a_row_and_its_status_lists_its_pods_by_rank():
    expected = ("big", "PyTorchJob", "pending", "43%", "1/2", "2", "12d4h", "ErrImagePull")
    assert display.job_row(BIG) == expected
    assert display.format_status(BIG, jobs.cluster_messages(BIG)).splitlines() == [
        "big  pending",
        f"created {CREATED}, 12d4h ago, on 2 nodes, a PyTorchJob, queue gpus",
        "43% done, about 12m5s to go; loss 0.532, images/s 41, AP 0.312",
        "",
        "RANK  POD           PHASE    RESTARTS  EXIT  NODE  REASON",
        "0     big-worker-0  Running  2         -     n1    -",
        "1     big-worker-1  Pending  0         -     -     ErrImagePull",
        "",
        "big-worker-1: no such image",
    ]
