"""`kubedet job`, against a fake API server."""

import pytest
from fake_pod import endless
from patience import until

from pipelines.commands import job


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    monkeypatch.setattr(job, "_POLL_SECONDS", 0.02)


@pytest.fixture
def submit(kubedet, fake_cluster):
    """Submits a job whose pods have a life, and whose other options may be given."""

    def submit(name, life=endless, *words):
        for kind in ("master", "worker"):
            fake_cluster.lives[f"{name}-{kind}-0"] = life
        return kubedet("job", "submit", "--name", name, "--image", "i:1", *words, "--", "true")

    return submit


def fails(pod):
    pod.run()
    pod.say("loading", "error: the loss is nan", "  fix: lower train.lr")
    pod.exit(3)


def test_submit_sends_the_job_and_says_what_to_do_next(kubedet, fake_cluster):
    words = ["-n", "team", "--name", "big", "--image", "i:1", "--nodes", 2, "--", "train", "--", "-x"]
    code, out, _ = kubedet("job", "submit", *words)
    assert code == 0
    assert "kubedet job status -n team big" in out
    container = fake_cluster.job("big", "team")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert container["containers"][0]["command"] == ["train", "--", "-x"]


def test_submit_and_wait_shows_the_log_and_ends_as_the_job_did(submit):
    code, out, _ = submit("good", lambda pod: (pod.run(), pod.say("epoch 1"), pod.exit(0)), "--wait")
    assert code == 0
    assert "epoch 1" in out
    code, _, err = submit("bad", fails, "--wait")
    assert code == 3
    assert "the loss is nan" in err


def test_status_shows_pods_and_says_what_holds_them_back(kubedet, submit, fake_cluster):
    submit("stuck", lambda pod: (pod.unschedulable("0/3 nodes have nvidia.com/gpu"), pod.sleep(60)))
    until(lambda: fake_cluster.pod("stuck-master-0").body["status"].get("conditions"))
    code, out, _ = kubedet("job", "status", "stuck")
    assert code == 0
    assert out.splitlines()[0] == "stuck  pending"
    assert "stuck-master-0  Pending" in out
    assert "0/3 nodes have nvidia.com/gpu" in out
    assert "FailedScheduling (x7)" in out


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "wait"])
def test_a_missing_job_is_an_error(kubedet, verb):
    code, _, err = kubedet("job", verb, "none")
    assert code == 2
    assert err == "error: namespace default has no job 'none'\n  fix: see `kubedet job list -n default`\n"


def test_a_command_where_none_belongs_is_refused(kubedet, fake_cluster):
    code, _, err = kubedet("job", "stop", "a", "--", "rm", "x")
    assert code == 2
    assert "takes no command: rm x" in err
    assert not fake_cluster.seen


def test_without_a_cluster_the_message_says_what_to_set(kubedet, monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = kubedet("job", "list")
    assert code == 2
    assert "KUBECONFIG" in err
    assert "Traceback" not in err
