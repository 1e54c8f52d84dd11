"""Jobs made, taken up, replaced, read and deleted."""

import threading
import time
from dataclasses import replace

import pytest
from fake_api import Fault
from fake_cluster import endless

from components.launchers.backend import Phase
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.refusals import ApiError
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC
from trainer.errors import ConfigError, LaunchError

JOBS = "pytorchjobs"


def until(condition, seconds=5.0):
    """Wait for something that a thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def uid(fake_cluster):
    return fake_cluster.job("train")["metadata"]["uid"]


@pytest.fixture
def endless_pods(fake_cluster):
    fake_cluster.lives |= {"train-master-0": endless, "train-worker-0": endless}


def test_a_job_is_created_as_it_is_rendered(backend, fake_cluster, job):
    spec = job(nodes=3, gpus=2)
    assert backend.submit(spec) == "train"
    body = fake_cluster.job("train")
    assert body["metadata"]["labels"][LABEL_MANAGED] == "kubedet"
    assert "ownerReferences" not in body["metadata"]
    assert body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert body["spec"]["nprocPerNode"] == "2"


def test_the_same_job_is_taken_up(backend, fake_cluster, job, endless_pods, caplog):
    caplog.set_level("INFO")
    backend.submit(job())
    first = uid(fake_cluster)
    assert backend.submit(job()) == "train"
    assert uid(fake_cluster) == first and not fake_cluster.requests("DELETE")
    assert "taking it up" in caplog.text


def test_a_finished_job_is_taken_up_too(backend, fake_cluster, job):
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.SUCCEEDED)
    first = uid(fake_cluster)
    backend.submit(job())
    assert uid(fake_cluster) == first


@pytest.mark.parametrize("change", [{"nodes": 2}, {"env": {"A": "1"}}, {"image": "i:2"}], ids=str)
def test_another_job_of_the_name_is_replaced(backend, fake_cluster, job, endless_pods, change):
    backend.submit(job())
    first = fake_cluster.job("train")["metadata"]
    backend.submit(job(**change))
    second = fake_cluster.job("train")["metadata"]
    assert second["uid"] != first["uid"]
    assert second["labels"][LABEL_SPEC] != first["labels"][LABEL_SPEC]
    (deletion,) = fake_cluster.requests("DELETE")
    assert deletion.body["preconditions"] == {"uid": first["uid"]}


def test_a_failed_job_is_started_anew(backend, fake_cluster, job):
    def fails(pod):
        pod.run()
        pod.exit(1)

    fake_cluster.lives["train-master-0"] = [fails, endless]
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.FAILED)
    first = uid(fake_cluster)
    backend.submit(job())
    assert uid(fake_cluster) != first


def test_a_job_is_created_only_when_the_old_ones_pods_are_gone(backend, fake_cluster, job, endless_pods):
    fake_cluster.termination_seconds = 0.4
    backend.submit(job(nodes=2))
    old = set(fake_cluster.pods)
    backend.submit(job(nodes=2, env={"A": "1"}))
    assert all(fake_cluster.pods[uid].deleted.is_set() for uid in old)


def test_pods_of_a_job_that_is_gone_are_waited_for(backend, fake_cluster, job, endless_pods):
    fake_cluster.termination_seconds = 0.4
    backend.submit(job())
    (old,) = fake_cluster.pods
    backend.stop("train", wait=False)
    backend.submit(job())
    assert fake_cluster.pods[old].deleted.is_set()


def test_pods_that_stay_are_named(backend, fake_cluster, job, endless_pods):
    fake_cluster.termination_seconds = 60
    backend.submit(job())
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"still: train-master-0") as error:
        backend.stop("train")
    assert time.monotonic() - begun < 4
    assert "--force" in error.value.fix


def test_somebody_elses_job_is_left_alone(backend, fake_cluster, job):
    fake_cluster.operator = False
    fake_cluster.create_job("default", {"metadata": {"name": "train"}, "spec": {"pytorchReplicaSpecs": {}}})
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="not made by kubedet"):
            act()
    assert fake_cluster.job("train") and not fake_cluster.requests("DELETE")


def test_a_creation_whose_answer_was_lost_is_found_again(backend, fake_cluster, job, endless_pods):
    fake_cluster.faults.append(Fault("POST", JOBS, lost=True))
    assert backend.submit(job()) == "train"
    assert len(fake_cluster.requests("POST", JOBS)) == 2 and not fake_cluster.requests("DELETE")


def test_a_creation_that_got_no_answer_at_all_is_looked_up(
    backend, fake_cluster, job, endless_pods, monkeypatch, caplog
):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=0.0))
    fake_cluster.faults.append(Fault("POST", JOBS, lost=True))
    assert backend.submit(job()) == "train"
    assert backend.submitted("train")[1] == uid(fake_cluster)
    assert "PyTorchJob train exists" in caplog.text and "kubedet job stop train" in caplog.text


def test_a_creation_of_which_nothing_is_known_says_how_to_look(backend, fake_cluster, job, monkeypatch):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=0.0))
    fake_cluster.faults.append(Fault("POST", JOBS, lost=True))

    def away(name, there, clear=backend._clear, **options):
        clear(name, there, **options)
        fake_cluster.faults.append(Fault("GET", JOBS, status=503, times=9))

    monkeypatch.setattr(backend, "_clear", away)
    with pytest.raises(ApiError, match="whether the PyTorchJob train was created is not known") as error:
        backend.submit(job())
    assert "kubedet job stop train" in error.value.fix


def test_a_creation_that_was_not_done_is_an_error(backend, fake_cluster, job, monkeypatch):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=0.0))
    fake_cluster.faults.append(Fault("POST", JOBS, drop=True))
    with pytest.raises(ApiError, match="no answer"):
        backend.submit(job())
    assert fake_cluster.job("train") is None


def test_a_job_that_others_make_again_and_again_is_given_up(backend, fake_cluster, job):
    fake_cluster.faults.append(Fault("POST", JOBS, times=100, status=409))
    with pytest.raises(LaunchError, match="others create jobs of that name"):
        backend.submit(job())


def test_nothing_is_sent_of_a_job_that_cannot_be(backend, fake_cluster, job):
    with pytest.raises(ConfigError, match="no container image"):
        backend.submit(job(image=""))
    with pytest.raises(ConfigError, match="namespace is team"):
        backend.submit(job(namespace="team"))
    assert not fake_cluster.requests("POST")


def test_another_namespace_is_another_backend(backend, fake_cluster, job):
    assert backend.within("") is backend and backend.within("default") is backend
    team = backend.within("team")
    team.submit(job(namespace="team"))
    assert fake_cluster.job("train", "team") and not fake_cluster.job("train")


def test_the_refusal_of_the_webhook_is_not_one_of_rbac(backend, fake_cluster, job):
    message = 'admission webhook "validator" denied the request: spec.x: Invalid value'
    fake_cluster.faults.append(Fault("POST", JOBS, status=403, message=message))
    with pytest.raises(ApiError, match="denied the request") as error:
        backend.submit(job())
    assert "Role" not in error.value.fix and error.value.exit_code == 2


def test_stop_waits_until_all_is_gone_and_may_be_repeated(backend, fake_cluster, job, endless_pods):
    fake_cluster.termination_seconds = 0.3
    backend.submit(job(nodes=2))
    backend.stop("train")
    assert not [key for key in fake_cluster.objects if key[0] in ("pods", JOBS)]
    backend.stop("train")
    backend.abandon("train")


def test_abandoning_is_one_request(backend, fake_cluster, job, endless_pods):
    backend.submit(job())
    before, first = len(fake_cluster.seen), uid(fake_cluster)
    backend.abandon("train")
    (deletion,) = fake_cluster.seen[before:]
    assert (deletion.method, deletion.body["preconditions"]) == ("DELETE", {"uid": first})


def test_the_status_tells_of_pods(backend, fake_cluster, job):
    def killed(pod):
        pod.run(node="node-7")
        pod.exit(137, "OOMKilled")

    fake_cluster.lives |= {
        "train-master-0": endless,
        "train-worker-0": killed,
        "train-worker-1": lambda pod: pod.wait("ImagePullBackOff", "no such image"),
    }
    backend.submit(job(nodes=3, restart_policy="Never"))
    until(lambda: backend.status("train").phase is Phase.FAILED)
    status = backend.status("train")
    assert status.nodes == 3 and status.created and "worker replica(s) failed" in status.message
    (pod,) = status.pods
    assert (pod.name, pod.rank, pod.exit_code, pod.reason) == ("train-worker-0", 1, 137, "OOMKilled")
    assert pod.node == "node-7" and pod.uid and pod.ended


def test_a_pod_that_is_made_anew_counts_as_restart(backend, fake_cluster, job):
    go_on = threading.Event()

    def preempted(pod):
        pod.run()
        pod.until(go_on)
        pod.exit(143)

    fake_cluster.lives["train-master-0"] = [preempted, endless]
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.RUNNING)
    assert backend.status("train").pods[0].restarts == 0
    go_on.set()
    until(lambda: backend.status("train").pods[0].restarts == 1)


def test_what_a_queue_takes_back_is_no_restart(backend, fake_cluster, job, endless_pods):
    backend.submit(job())
    body = fake_cluster.job("train")
    until(lambda: backend.status("train").phase is Phase.RUNNING)
    fake_cluster.condition(body, "Suspended")
    fake_cluster.delete_pod(fake_cluster.pod("train-master-0"))
    assert backend.status("train").phase is Phase.SUSPENDED
    fake_cluster.start(body)
    until(lambda: backend.status("train").phase is Phase.RUNNING)
    assert backend.status("train").pods[0].restarts == 0


def test_phases_follow_the_conditions_that_hold(backend, fake_cluster, job):
    fake_cluster.operator = False
    assert backend.status("train").phase is Phase.GONE
    backend.submit(job())
    body = fake_cluster.job("train")
    assert backend.status("train").phase is Phase.PENDING
    for kind, phase in [
        ("Suspended", Phase.SUSPENDED),
        ("Failed", Phase.FAILED),
        ("Succeeded", Phase.SUCCEEDED),
    ]:
        fake_cluster.condition(body, kind, message="why")
        status = backend.status("train")
        assert (status.phase, status.reason, status.message) == (phase, f"PyTorchJob{kind}", "why")
        fake_cluster.condition(body, kind, status="False")
        assert backend.status("train").phase is Phase.PENDING
    fake_cluster.condition(body, "Restarting")
    assert backend.status("train").phase is Phase.RESTARTING


def test_running_is_when_all_pods_run(backend, fake_cluster, job):
    go_on = threading.Event()

    def late(pod):
        pod.until(go_on)
        endless(pod)

    fake_cluster.lives |= {"train-master-0": endless, "train-worker-0": late}
    backend.submit(job(nodes=2))
    until(lambda: any(pod.phase == "Running" for pod in backend.status("train").pods))
    assert backend.status("train").phase is Phase.PENDING
    go_on.set()
    until(lambda: backend.status("train").phase is Phase.RUNNING)


def test_an_elastic_job_runs_with_enough_nodes(backend, fake_cluster, job):
    fake_cluster.lives |= {"train-worker-0": endless, "train-worker-1": lambda pod: pod.unschedulable("full")}
    from components.launchers.spec import Elastic

    backend.submit(job(nodes=2, elastic=Elastic(min_nodes=1, max_nodes=2)))
    until(lambda: backend.status("train").phase is Phase.RUNNING)
    status = backend.status("train")
    assert status.elastic and [pod.rank for pod in status.pods] == [0, 1]


def test_kubedets_jobs_are_listed(backend, fake_cluster, job):
    backend.submit(job(name="one"))
    backend.submit(job(name="two"))
    fake_cluster.create_job("default", {"metadata": {"name": "foreign"}, "spec": {"pytorchReplicaSpecs": {}}})
    assert {status.name for status in backend.list_jobs()} == {"one", "two"}
    until(lambda: all(status.phase is Phase.SUCCEEDED for status in backend.list_jobs()))
    assert all(len(status.pods) == 1 for status in backend.list_jobs())


def test_logs_are_those_of_rank_0_and_of_pods_that_fail(backend, fake_cluster, job):
    def fails(pod):
        pod.run()
        pod.say("worker's last words")
        pod.exit(1)

    def master(pod):
        pod.run()
        pod.say("rank 0")
        pod.sleep(60)

    fake_cluster.lives |= {"train-master-0": master, "train-worker-0": fails, "train-worker-1": endless}
    backend.submit(job(nodes=3))
    lines = {(line.pod, line.text) for line in backend.logs("train")}
    assert ("train-worker-0", "worker's last words") in lines
    assert not any(pod == "train-worker-1" for pod, _ in lines)


def test_logs_of_now_end_at_once(backend, fake_cluster, job, endless_pods):
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.RUNNING)
    assert [line.text for line in backend.logs("train", follow=False)] == ["hello from train-master-0"]


def test_nothing_is_sent_to_connect(fake_cluster):
    ClusterBackend.connect()
    assert not fake_cluster.seen
