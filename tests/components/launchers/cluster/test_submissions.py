"""Jobs are created, adopted, replaced and deleted."""

import logging
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
from components.launchers.cluster.kinds import KINDS
from components.launchers.kubernetes_names import LABEL_MANAGED, LABEL_SPEC
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
        assert body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
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
def test_a_failed_job_is_recreated(backend, fake_cluster, job, first):
    def fails(pod):
        pod.run()
        pod.exit(1)

    fake_cluster.lives[first] = [fails, endless]
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


def test_pods_that_stay_are_named(backend, fake_cluster, job, endless_pods, first):
    fake_cluster.termination_seconds = 600
    backend.submit(job())
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="still: ") as error:
        backend.stop("train")
    assert plain(error.value.message).endswith(f"still: {first}")
    assert time.monotonic() - begun < 60
    assert "--force" in error.value.fix


def test_a_foreign_job_is_left_alone(backend, fake_cluster, job, kind):
    make_by_hand(fake_cluster, kind, "train")
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="not created by kubedet"):
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
    with pytest.raises(LaunchError, match="another launcher keeps creating jobs"):
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


@pytest.fixture
def knows(fake_cluster, timings):
    """Let the fake cluster know some kinds; returns a backend of whatever there is."""

    def install(*plurals):
        fake_cluster.installed = set(plurals)
        fake_cluster.lives |= {"train-worker-0": endless, "train-node-0-0": endless}
        return ClusterBackend.connect(timings=timings)

    return install


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (["pytorchjobs"], "PyTorchJob"),
        (["trainjobs"], "TrainJob"),
        (["pytorchjobs", "trainjobs"], "PyTorchJob"),
    ],
    ids=["v1", "v2", "both"],
)
def test_a_job_becomes_what_the_cluster_knows(knows, job, fake_cluster, caplog, installed, chosen):
    caplog.set_level(logging.INFO)
    backend = knows(*installed)
    assert backend.status("train").phase == "gone"
    backend.submit(job())
    assert backend.status("train").kind == chosen
    assert f"jobs are {chosen}s here" in caplog.text
    assert (
        len([seen for seen in fake_cluster.requests("POST") if "dryRun" in seen.path]) <= len(installed) + 1
    )
    # And again, by another launcher, which finds it and asks nothing more.
    before = len(fake_cluster.requests("POST"))
    ClusterBackend.connect().submit(job())
    assert len(fake_cluster.requests("POST")) == before
    backend.stop("train")
    assert fake_cluster.job("train") is None


def test_the_kind_whose_controller_is_away_is_passed_over(knows, job, fake_cluster, caplog):
    caplog.set_level(logging.INFO)
    backend = knows("pytorchjobs", "trainjobs")
    fake_cluster.operator = False
    backend.submit(job())
    assert backend.status("train").kind == "TrainJob"
    assert "PyTorchJob: its controller does not answer (the Training Operator (v1.9))" in caplog.text


def test_a_cluster_that_runs_no_jobs_says_what_to_install(knows, job, fake_cluster):
    backend = knows("workloads")
    for act in (lambda: backend.status("train"), backend.list_jobs, lambda: backend.submit(job())):
        with pytest.raises(ConfigError, match="PyTorchJob: the cluster does not know them") as error:
            act()
        assert "TrainJob: the cluster does not know them" in error.value.message
        assert "install Kubeflow Trainer (v2.3) or the Training Operator (v1.9)" in error.value.fix
    backend = knows("pytorchjobs", "trainjobs")
    fake_cluster.operator, fake_cluster.trainer.away = False, True
    with pytest.raises(ConfigError) as error:
        backend.submit(job())
    assert error.value.message == (
        "this cluster runs no training jobs:\n"
        "  PyTorchJob: its controller does not answer (the Training Operator (v1.9))\n"
        "  TrainJob: its controller does not answer (Kubeflow Trainer (v2.3) and JobSet)"
    )
    assert "install Kubeflow Trainer (v2.3) or the Training Operator (v1.9)" in error.value.fix


def test_a_kind_that_may_not_be_made_is_passed_over(knows, job, fake_cluster, caplog):
    caplog.set_level(logging.INFO)
    backend = knows("pytorchjobs", "trainjobs")
    fake_cluster.denied |= {(verb, "pytorchjobs") for verb in ("get", "list", "create")}
    backend.submit(job())
    assert [status.kind for status in backend.list_jobs()] == ["TrainJob"]
    assert "PyTorchJob: you may not create them" in caplog.text
    backend.stop("train")


@pytest.mark.parametrize("what", ["trainjobs", "trainingruntimes"])
def test_what_a_role_for_trainjobs_lacks_is_named(knows, job, fake_cluster, what):
    backend = knows("trainjobs")
    fake_cluster.denied.add(("create", what))
    with pytest.raises(ApiError, match=f"cannot create {what}") as error:
        backend.submit(job())
    rule = f'apiGroups ["trainer.kubeflow.org"], resources ["{what}"], verbs ["create"]'
    assert rule in error.value.fix and not fake_cluster.job("train")


def test_jobs_of_both_kinds_are_in_one_list_and_found_by_name(knows, job, fake_cluster, timings):
    backend = knows("pytorchjobs", "trainjobs")
    fake_cluster.lives |= {"old-worker-0": endless, "new-node-0-0": endless}
    ClusterBackend.connect(timings=timings, kinds=[backend.kinds.possible[0]]).submit(job(name="old"))
    ClusterBackend.connect(timings=timings, kinds=[backend.kinds.possible[1]]).submit(job(name="new"))
    assert {(status.name, status.kind) for status in backend.list_jobs()} == {
        ("old", "PyTorchJob"),
        ("new", "TrainJob"),
    }
    assert backend.status("new").kind == "TrainJob" and len(backend.status("new").pods) == 1
    backend.submit(job(name="new"))  # It is adopted, not created again as a PyTorchJob.
    assert not fake_cluster.requests("DELETE")
    for name in ("new", "old"):
        backend.stop(name)
    assert backend.list_jobs() == []


def test_a_job_of_the_other_kind_is_replaced_by_one_of_the_preferred(knows, job, fake_cluster, timings):
    backend = knows("pytorchjobs", "trainjobs")
    ClusterBackend.connect(timings=timings, kinds=[backend.kinds.possible[1]]).submit(job())
    backend.submit(job(env={"A": "1"}))
    assert backend.status("train").kind == "PyTorchJob"
    assert [status.kind for status in backend.list_jobs()] == ["PyTorchJob"]


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(
    ("held", "phase"), [([], "suspended"), (["Failed"], "failed"), (["Suspended", "Failed"], "failed")]
)
def test_an_end_counts_more_than_a_suspension(job, kind, held, phase):
    *_, body = kind.manifests(job(kueue_queue="q"), lambda *_: False)
    conditions = [{"type": name, "status": "True"} for name in held]
    assert kind.state({**body, "status": {"conditions": conditions}}).phase == phase


RUNTIMES = "trainingruntimes"


@pytest.fixture
def trainjobs(fake_cluster, timings):
    fake_cluster.installed = {"trainjobs"}
    return ClusterBackend.connect(timings=timings, kinds=[KINDS["trainjob"]])


def runtimes(cluster):
    return [body for (resource, *_), body in list(cluster.objects.items()) if resource == RUNTIMES]


def owners(cluster):
    (runtime,) = runtimes(cluster)
    return [(owner["kind"], owner["uid"]) for owner in runtime["metadata"].get("ownerReferences") or []]


def gone(cluster, seconds=30):
    end = time.monotonic() + seconds
    while runtimes(cluster) and time.monotonic() < end:
        time.sleep(0.01)
    return not runtimes(cluster)


def test_a_runtime_of_its_own_belongs_to_the_job_and_goes_with_it(trainjobs, job, fake_cluster):
    trainjobs.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]
    (runtime,) = runtimes(fake_cluster)
    # With it a job that is deleted in the foreground would wait for ever.
    assert "blockOwnerDeletion" not in str(runtime)
    trainjobs.stop("train")
    assert gone(fake_cluster)


def test_a_job_that_is_refused_leaves_no_runtime(trainjobs, job, fake_cluster):
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=422, message="no such field"))
    with pytest.raises(ApiError, match="no such field"):
        trainjobs.submit(job(backoff=3))
    assert runtimes(fake_cluster) == []
    assert fake_cluster.job("train") is None


def test_the_runtime_of_a_deleted_job_is_taken_over_before_the_cluster_collects_it(
    trainjobs, job, fake_cluster
):
    fake_cluster.trainer.collection_seconds = 0.3
    fake_cluster.lives["train-node-0-0"] = lambda pod: (pod.run(), pod.exit(1))
    trainjobs.submit(job(backoff=3))
    while not trainjobs.status("train").phase.final:
        time.sleep(0.01)
    trainjobs.submit(job(backoff=3))  # It failed: it is deleted and created again.
    time.sleep(0.6)
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    ['TrainingRuntime.trainer.kubeflow.org "NAME" not found: must be created', "runtime 'NAME' not found"],
    ids=["Trainer", "Kueue"],
)
def test_a_runtime_that_a_controller_has_not_seen_yet_is_waited_for(trainjobs, job, fake_cluster, message):
    trainjobs.submit(job(backoff=3))
    (runtime,) = runtimes(fake_cluster)
    words = message.replace("NAME", runtime["metadata"]["name"])
    trainjobs.stop("train")
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=2))
    trainjobs.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]
    trainjobs.stop("train")
    fake_cluster.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=10**6))
    with pytest.raises(ApiError, match="not found"):
        trainjobs.submit(job(backoff=3))
    assert runtimes(fake_cluster) == []


@pytest.mark.parametrize("away", [0, 10**6], ids=["for a moment", "for long"])
def test_a_job_whose_answer_was_lost_owns_its_runtime(trainjobs, job, fake_cluster, away):
    fake_cluster.faults.append(Fault("POST", "/trainjobs", lost=True))
    fake_cluster.faults.append(Fault("POST", "/trainjobs", drop=True, times=away))
    trainjobs.submit(job(backoff=3))
    assert owners(fake_cluster) == [("TrainJob", fake_cluster.job("train")["metadata"]["uid"])]


def test_a_runtime_that_may_not_be_patched_is_reported_and_the_job_runs(trainjobs, job, fake_cluster, caplog):
    fake_cluster.denied.add(("patch", RUNTIMES))
    trainjobs.submit(job(backoff=3))
    assert fake_cluster.job("train")
    assert "stays when its job is deleted" in caplog.text
