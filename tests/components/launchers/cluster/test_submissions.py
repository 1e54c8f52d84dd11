"""Jobs are created, adopted, replaced and deleted."""

import threading
import time
from dataclasses import replace

import pytest
from fake_api import Fault
from fake_pod import endless
from kinds import both, make_by_hand, plain, pod_name
from patience import until

from components.launchers.backend import Phase
from components.launchers.cluster import job_objects
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError
from components.launchers.pod_template import LABEL_MANAGED, LABEL_SPEC
from trainer.base.errors import ConfigError, LaunchError


def uid(fake_cluster):
    return fake_cluster.job("train")["metadata"]["uid"]


@both
def test_a_job_is_created_as_it_is_rendered(backend, fake_cluster, job, kind):
    spec = job(nodes=3, gpus=2)
    backend.submit(spec)
    body = fake_cluster.job("train")
    assert body["metadata"]["labels"][LABEL_MANAGED] == "kubedet"
    assert "ownerReferences" not in body["metadata"]
    if kind.name == "pytorchjob":
        assert body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
        assert body["spec"]["nprocPerNode"] == "2"
    else:
        assert body["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 2}
    assert {pod.base for pod in fake_cluster.pods.values()} == {pod_name(kind, rank) for rank in range(3)}


@both
def test_the_same_job_is_adopted(backend, fake_cluster, job, endless_pods, caplog):
    caplog.set_level("INFO")
    backend.submit(job())
    first = uid(fake_cluster)
    backend.submit(job())
    assert uid(fake_cluster) == first
    assert not fake_cluster.requests("DELETE")
    assert "adopting it" in caplog.text


def test_a_finished_job_is_adopted_too(backend, fake_cluster, job):
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.SUCCEEDED)
    first = uid(fake_cluster)
    backend.submit(job())
    assert uid(fake_cluster) == first


@both
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


@both
def test_a_failed_job_is_recreated(backend, fake_cluster, job, master):
    def fails(pod):
        pod.run()
        pod.exit(1)

    fake_cluster.lives[master] = [fails, endless]
    backend.submit(job())
    until(lambda: backend.status("train").phase is Phase.FAILED)
    first = uid(fake_cluster)
    backend.submit(job())
    assert uid(fake_cluster) != first


@both
def test_a_job_is_created_only_when_the_old_ones_pods_are_gone(backend, fake_cluster, job, endless_pods):
    fake_cluster.termination_seconds = 0.4
    backend.submit(job(nodes=2))
    old = set(fake_cluster.pods)
    backend.submit(job(nodes=2, env={"A": "1"}))
    assert all(fake_cluster.pods[uid].deleted.is_set() for uid in old)


def test_pods_that_stay_are_named(backend, fake_cluster, job, endless_pods, master):
    fake_cluster.termination_seconds = 600
    backend.submit(job())
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="still: ") as error:
        backend.stop("train")
    assert plain(error.value.message).endswith(f"still: {master}")
    assert time.monotonic() - begun < 60
    assert "--force" in error.value.fix


def test_a_foreign_job_is_left_alone(backend, fake_cluster, job, kind):
    make_by_hand(fake_cluster, kind, "train")
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="not made by kubedet"):
            act()
    assert fake_cluster.job("train") and not fake_cluster.requests("DELETE")
    assert backend.list_jobs() == []


@pytest.mark.parametrize("patience", [2.0, 0.0])
def test_a_creation_whose_answer_was_lost_is_found_again(
    backend, fake_cluster, job, endless_pods, kind, monkeypatch, patience
):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=patience))
    fake_cluster.faults.append(Fault("POST", kind.plural, lost=True))
    backend.submit(job())
    assert fake_cluster.job("train") and not fake_cluster.requests("DELETE")


def test_a_creation_of_which_nothing_is_known_says_how_to_look(backend, fake_cluster, job, monkeypatch, kind):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=0.0))
    fake_cluster.faults.append(Fault("POST", kind.plural, lost=True))

    def away(*arguments, remove=job_objects.remove, **options):
        remove(*arguments, **options)
        fake_cluster.faults.append(Fault("GET", kind.plural, status=503, times=9))

    monkeypatch.setattr(job_objects, "remove", away)
    with pytest.raises(ApiError, match=f"whether the {kind.title} train was created is not known") as error:
        backend.submit(job())
    assert "kubedet job stop train" in error.value.fix


def test_a_job_that_others_make_again_and_again_is_given_up(backend, fake_cluster, job, kind):
    fake_cluster.faults.append(Fault("POST", kind.plural, times=100, status=409))
    with pytest.raises(LaunchError, match="others create jobs of that name"):
        backend.submit(job())


def test_nothing_is_sent_of_a_job_that_cannot_be(backend, fake_cluster, job):
    with pytest.raises(ConfigError, match="no container image"):
        backend.submit(job(image=""))
    with pytest.raises(ConfigError, match="namespace is team"):
        backend.submit(job(namespace="team"))
    assert not fake_cluster.requests("POST")


def test_the_refusal_of_the_webhook_is_not_one_of_rbac(backend, fake_cluster, job, kind):
    message = 'admission webhook "validator" denied the request: spec.x: Invalid value'
    fake_cluster.faults.append(Fault("POST", kind.plural, status=403, message=message))
    with pytest.raises(ApiError, match="denied the request") as error:
        backend.submit(job())
    assert "Role" not in error.value.fix and error.value.exit_code == 2


@both
def test_stop_waits_until_all_is_gone_and_may_be_repeated(backend, fake_cluster, job, endless_pods, kind):
    fake_cluster.termination_seconds = 0.3
    backend.submit(job(nodes=2))
    backend.stop("train")
    assert not [key for key in fake_cluster.objects if key[0] in ("pods", kind.plural, "trainingruntimes")]
    backend.stop("train")
    backend.withdraw("train")


@both
def test_withdrawing_begins_with_the_deletion(backend, fake_cluster, job, endless_pods):
    backend.submit(job())
    before, first = len(fake_cluster.seen), uid(fake_cluster)
    backend.withdraw("train", wait=False)
    (deletion,) = fake_cluster.seen[before:]
    assert (deletion.method, deletion.body["preconditions"]) == ("DELETE", {"uid": first})


AWAY = (
    'Internal error occurred: failed calling webhook "validator.pytorchjob.training-operator.kubeflow.org": '
    'failed to call webhook: Post "https://training-operator.kubeflow.svc:443/validate-kubeflow-org-v1-pytorchjob'
    '?timeout=10s": dial tcp 10.96.80.99:443: connect: connection refused'
)


def test_a_stopped_operator_is_waited_for_as_an_outage(job, kind, fake_cluster, timings):
    backend = ClusterBackend.connect(timings=replace(timings, patience=0.1, outage=60), kinds=[kind])
    fake_cluster.faults.append(Fault("POST", kind.plural, status=500, message=AWAY, times=6))
    backend.submit(job())
    assert len(fake_cluster.requests("POST", kind.plural)) == 7


def test_any_of_several_controllers_is_waited_for(job, fake_cluster, timings):
    fake_cluster.installed = {"pytorchjobs", "trainjobs", "trainingruntimes"}
    fake_cluster.operator, fake_cluster.trainer.away = False, True
    backend = ClusterBackend.connect(timings=replace(timings, outage=60))
    threading.Timer(0.5, lambda: setattr(fake_cluster, "operator", True)).start()
    backend.submit(job())
    assert backend.status("train").kind == "PyTorchJob"
