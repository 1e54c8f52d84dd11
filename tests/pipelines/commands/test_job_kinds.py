"""`kubedet job` with PyTorchJobs and TrainJobs."""

import json

import pytest
from fake_exec import give_exec
from fake_pod import endless
from kinds import plain, pod_name
from patience import until

from components.launchers.cluster.kinds import KINDS

SUBMIT = ["job", "submit", "--name", "train", "--image", "i:1"]


@pytest.fixture(params=["pytorchjob", "trainjob"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def backend(kind, fake_cluster):
    """Further words of a command: none if the cluster runs no other kind of jobs."""
    alone = kind.name == "trainjob"
    fake_cluster.installed = {kind.plural} if alone else {of.plural for of in KINDS.values()}
    return [] if alone else ["--backend", kind.name]


@pytest.fixture
def submit(kubedet, fake_cluster, kind, backend):
    """Submits a job of two nodes with the lives of its pods."""

    def submit(*lives, words=()):
        fake_cluster.lives |= {pod_name(kind, rank): life for rank, life in enumerate(lives)}
        return kubedet(*SUBMIT, "--nodes", len(lives), *backend, *words, "--", "true")

    return submit


def running(fake_cluster, kind, number=2):
    def run():
        pods = [fake_cluster.pod(pod_name(kind, rank)) for rank in range(number)]
        return all(pod and pod.body["status"]["phase"] == "Running" and pod.containers[0] for pod in pods)

    until(run)


def test_a_job_from_its_beginning_to_its_end(kubedet, submit, fake_cluster, kind, backend):
    assert submit(endless, endless)[0] == 0
    running(fake_cluster, kind)
    head, row = kubedet("job", "list", *backend)[1].splitlines()
    cells = dict(zip(head.split(), row.split(), strict=True))
    shown = [cells[head] for head in ("NAME", "KIND", "PHASE", "PODS")]
    assert shown == ["train", kind.title, "running", "2/2"]
    (status,) = json.loads(kubedet("job", "list", "-o", "json", *backend)[1])
    assert (status["kind"], [pod["rank"] for pod in status["pods"]]) == (kind.title, [0, 1])
    out = plain(kubedet("job", "status", "train", *backend)[1])
    assert out.splitlines()[0] == "train  running" and pod_name(kind, 1) in out
    first = pod_name(kind, 0)
    assert plain(kubedet("job", "logs", "train", *backend)[1]) == f"{first}: hello from {first}\n"
    code, out, _ = kubedet("job", "stop", "train", *backend)
    assert (code, out.splitlines()[-1]) == (0, "deleted train")
    assert not [key for key in fake_cluster.objects if key[0] in ("pods", "trainingruntimes")]


def test_the_log_of_one_rank_and_a_command_in_it(kubedet, submit, fake_cluster, kind, backend):
    give_exec(fake_cluster)
    submit(endless, endless)
    running(fake_cluster, kind)
    second = pod_name(kind, 1)
    assert plain(kubedet("job", "logs", "train", "--rank", 1, *backend)[1]) == f"hello from {second}\n"
    words = ["job", "exec", "train", "--rank", 1, *backend, "--", "sh", "-c", "echo $0; exit 5", "x"]
    assert kubedet(*words)[:2] == (5, "x\n")
    ((name, containers, _),) = fake_cluster.executed
    assert plain(name) == second and containers == [fake_cluster.pod(second).container]
