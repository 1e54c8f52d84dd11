"""Jobs are created, adopted, replaced and deleted."""

import logging
from dataclasses import replace

import pytest
from cluster.api import Fault
from cluster.fixtures import connect_backend
from cluster.pods import endless
from kinds import both, make_by_hand, plain, pod_name

from components.launchers.backend import Phase
from components.launchers.cluster import job_objects
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.kinds import KINDS
from components.launchers.kubernetes_names import LABEL_MANAGED, LABEL_SPEC
from trainer.base.errors import ConfigError, LaunchError


def uid(simulated):
    return simulated.job("train")["metadata"]["uid"]


@both
def test_a_job_is_created_as_it_is_rendered(backend, simulated, job, kind):
    spec = job(nodes=3, gpus=2)
    backend.submit(spec)
    body = simulated.job("train")
    assert body["metadata"]["labels"][LABEL_MANAGED] == "kubedet"
    assert "ownerReferences" not in body["metadata"]
    if kind.name == "pytorchjob":
        assert body["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
        assert body["spec"]["nprocPerNode"] == "2"
    else:
        assert body["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 2}
    assert {pod.base for pod in simulated.pods.values()} == {pod_name(kind, rank) for rank in range(3)}


@both
def test_the_same_job_is_adopted(backend, simulated, job, endless_pods, caplog):
    caplog.set_level("INFO")
    backend.submit(job())
    first = uid(simulated)
    backend.submit(job())
    assert uid(simulated) == first
    assert not simulated.requests("DELETE")
    assert "adopting it" in caplog.text


def test_a_finished_job_is_adopted_too(backend, simulated, job):
    backend.submit(job())
    simulated.clock.until(lambda: backend.status("train").phase is Phase.SUCCEEDED)
    first = uid(simulated)
    backend.submit(job())
    assert uid(simulated) == first


@both
@pytest.mark.parametrize("change", [{"nodes": 2}, {"env": {"A": "1"}}, {"image": "i:2"}], ids=str)
def test_another_job_of_the_name_is_replaced(backend, simulated, job, endless_pods, change):
    backend.submit(job())
    first = simulated.job("train")["metadata"]
    backend.submit(job(**change))
    second = simulated.job("train")["metadata"]
    assert second["uid"] != first["uid"]
    assert second["labels"][LABEL_SPEC] != first["labels"][LABEL_SPEC]
    (deletion,) = simulated.requests("DELETE")
    assert deletion.body["preconditions"] == {"uid": first["uid"]}


@both
def test_a_failed_job_is_recreated(backend, simulated, job, first):
    def fails(pod):
        pod.run()
        pod.exit(1)

    simulated.lives[first] = [fails, endless]
    backend.submit(job())
    simulated.clock.until(lambda: backend.status("train").phase is Phase.FAILED)
    first = uid(simulated)
    backend.submit(job())
    assert uid(simulated) != first


@both
def test_a_job_is_created_only_when_the_old_ones_pods_are_gone(backend, simulated, job, endless_pods):
    simulated.termination_seconds = 0.4
    backend.submit(job(nodes=2))
    old = set(simulated.pods)
    backend.submit(job(nodes=2, env={"A": "1"}))
    assert all(simulated.pods[uid].gone for uid in old)


def test_pods_that_stay_are_named(backend, simulated, job, endless_pods, first):
    simulated.termination_seconds = 600
    backend.submit(job())
    begun = simulated.clock.monotonic()
    with pytest.raises(LaunchError, match="was deleted, but") as error:
        backend.stop("train")
    assert plain(error.value.message).endswith(f": {first}")
    assert simulated.clock.monotonic() - begun < 60
    assert "--force" in error.value.fix


def test_a_foreign_job_is_left_alone(backend, simulated, job, kind):
    make_by_hand(simulated, kind, "train")
    for act in (lambda: backend.submit(job()), lambda: backend.stop("train")):
        with pytest.raises(LaunchError, match="not created by kubedet"):
            act()
    assert simulated.job("train") and not simulated.requests("DELETE")
    assert backend.list_jobs() == []


@pytest.mark.parametrize("patience", [2.0, 0.0])
def test_a_creation_whose_answer_was_lost_is_found_again(
    backend, simulated, job, endless_pods, kind, monkeypatch, patience
):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=patience))
    simulated.faults.append(Fault("POST", kind.plural, lost=True))
    backend.submit(job())
    assert simulated.job("train") and not simulated.requests("DELETE")


def test_a_creation_of_which_nothing_is_known_says_how_to_look(backend, simulated, job, monkeypatch, kind):
    monkeypatch.setattr(backend.cluster, "timings", replace(backend.cluster.timings, patience=0.0))
    simulated.faults.append(Fault("POST", kind.plural, lost=True))

    def away(*arguments, remove=job_objects.delete_job, **options):
        remove(*arguments, **options)
        simulated.faults.append(Fault("GET", kind.plural, status=503, times=9))

    monkeypatch.setattr(job_objects, "delete_job", away)
    with pytest.raises(ApiError, match=f"whether the {kind.title} train was created is not known") as error:
        backend.submit(job())
    assert "kubedet job stop train" in error.value.fix


def test_a_job_that_others_make_again_and_again_is_given_up(backend, simulated, job, kind):
    simulated.faults.append(Fault("POST", kind.plural, times=100, status=409))
    with pytest.raises(LaunchError, match="another launcher keeps creating jobs"):
        backend.submit(job())


def test_nothing_is_sent_of_a_job_that_cannot_be(backend, simulated, job):
    with pytest.raises(ConfigError, match="no container image"):
        backend.submit(job(image=""))
    with pytest.raises(ConfigError, match="namespace is team"):
        backend.submit(job(namespace="team"))
    assert not simulated.requests("POST")


def test_the_refusal_of_the_webhook_is_not_one_of_rbac(backend, simulated, job, kind):
    message = 'admission webhook "validator" denied the request: spec.x: Invalid value'
    simulated.faults.append(Fault("POST", kind.plural, status=403, message=message))
    with pytest.raises(ApiError, match="denied the request") as error:
        backend.submit(job())
    assert "Role" not in error.value.fix and error.value.exit_code == 2


@both
def test_stop_waits_until_all_is_gone_and_may_be_repeated(backend, simulated, job, endless_pods, kind):
    simulated.termination_seconds = 0.3
    backend.submit(job(nodes=2))
    backend.stop("train")
    assert not [key for key in simulated.objects if key[0] in ("pods", kind.plural, "trainingruntimes")]
    backend.stop("train")
    backend.withdraw("train")


@both
def test_withdrawing_begins_with_the_deletion(backend, simulated, job, endless_pods):
    backend.submit(job())
    before, first = len(simulated.seen), uid(simulated)
    backend.withdraw("train", wait=False)
    (deletion,) = simulated.seen[before:]
    assert (deletion.method, deletion.body["preconditions"]) == ("DELETE", {"uid": first})


AWAY = (
    'Internal error occurred: failed calling webhook "validator.pytorchjob.training-operator.kubeflow.org": '
    'failed to call webhook: Post "https://training-operator.kubeflow.svc:443/validate-kubeflow-org-v1-pytorchjob'
    '?timeout=10s": dial tcp 10.96.80.99:443: connect: connection refused'
)


def test_a_stopped_operator_is_waited_for_as_an_outage(job, kind, simulated, timings):
    backend = connect_backend(simulated, [kind], replace(timings, patience=0.1, outage=60))
    simulated.faults.append(Fault("POST", kind.plural, status=500, message=AWAY, times=6))
    backend.submit(job())
    assert len(simulated.requests("POST", kind.plural)) == 7


def test_any_of_several_controllers_is_waited_for(job, simulated, timings):
    simulated.installed = {"pytorchjobs", "trainjobs", "trainingruntimes"}
    simulated.away = {"pytorchjobs", "trainjobs"}
    backend = connect_backend(simulated, timings=replace(timings, outage=60))
    simulated.later(0.5, simulated.away.remove, "pytorchjobs")
    backend.submit(job())
    assert backend.status("train").kind == "PyTorchJob"


@pytest.fixture
def knows(simulated):
    """Let the cluster know some kinds; returns a backend of whatever there is."""

    def install(*plurals):
        simulated.installed = set(plurals)
        simulated.lives |= {"train-worker-0": endless, "train-node-0-0": endless}
        return connect_backend(simulated)

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
def test_a_job_becomes_what_the_cluster_knows(knows, job, simulated, caplog, installed, chosen):
    caplog.set_level(logging.INFO)
    backend = knows(*installed)
    assert backend.status("train").phase == "gone"
    backend.submit(job())
    assert backend.status("train").kind == chosen
    assert f"jobs are {chosen}s here" in caplog.text
    assert len([seen for seen in simulated.requests("POST") if "dryRun" in seen.path]) <= len(installed) + 1
    # And again, by another launcher, which finds it and asks nothing more.
    before = len(simulated.requests("POST"))
    connect_backend(simulated).submit(job())
    assert len(simulated.requests("POST")) == before
    backend.stop("train")
    assert simulated.job("train") is None


def test_the_kind_whose_controller_is_away_is_passed_over(knows, job, simulated, caplog):
    caplog.set_level(logging.INFO)
    backend = knows("pytorchjobs", "trainjobs")
    simulated.away = {"pytorchjobs"}
    backend.submit(job())
    assert backend.status("train").kind == "TrainJob"
    assert "PyTorchJob: its controller does not answer (the Training Operator (v1.9))" in caplog.text


def test_a_cluster_that_runs_no_jobs_says_what_to_install(knows, job, simulated):
    backend = knows("workloads")
    for act in (lambda: backend.status("train"), backend.list_jobs, lambda: backend.submit(job())):
        with pytest.raises(ConfigError, match="PyTorchJob: the cluster does not know them") as error:
            act()
        assert "TrainJob: the cluster does not know them" in error.value.message
        assert "install Kubeflow Trainer (v2.3) or the Training Operator (v1.9)" in error.value.fix
    backend = knows("pytorchjobs", "trainjobs")
    simulated.away = {"pytorchjobs", "trainjobs"}
    with pytest.raises(ConfigError) as error:
        backend.submit(job())
    assert error.value.message == (
        "this cluster runs no training jobs:\n"
        "  PyTorchJob: its controller does not answer (the Training Operator (v1.9))\n"
        "  TrainJob: its controller does not answer (Kubeflow Trainer (v2.3) and JobSet)"
    )
    assert "install Kubeflow Trainer (v2.3) or the Training Operator (v1.9)" in error.value.fix


def test_a_kind_that_may_not_be_made_is_passed_over(knows, job, simulated, caplog):
    caplog.set_level(logging.INFO)
    backend = knows("pytorchjobs", "trainjobs")
    simulated.denied |= {(verb, "pytorchjobs") for verb in ("get", "list", "create")}
    backend.submit(job())
    assert [status.kind for status in backend.list_jobs()] == ["TrainJob"]
    assert "PyTorchJob: you may not create them" in caplog.text
    backend.stop("train")


@pytest.mark.parametrize("what", ["trainjobs", "trainingruntimes"])
def test_what_a_role_for_trainjobs_lacks_is_named(knows, job, simulated, what):
    backend = knows("trainjobs")
    simulated.denied.add(("create", what))
    with pytest.raises(ApiError, match=f"cannot create {what}") as error:
        backend.submit(job())
    rule = f'apiGroups ["trainer.kubeflow.org"], resources ["{what}"], verbs ["create"]'
    assert rule in error.value.fix and not simulated.job("train")


def test_jobs_of_both_kinds_are_in_one_list_and_found_by_name(knows, job, simulated):
    backend = knows("pytorchjobs", "trainjobs")
    simulated.lives |= {"old-worker-0": endless, "new-node-0-0": endless}
    connect_backend(simulated, [KINDS["pytorchjob"]]).submit(job(name="old"))
    connect_backend(simulated, [KINDS["trainjob"]]).submit(job(name="new"))
    assert {(status.name, status.kind) for status in backend.list_jobs()} == {
        ("old", "PyTorchJob"),
        ("new", "TrainJob"),
    }
    assert backend.status("new").kind == "TrainJob" and len(backend.status("new").pods) == 1
    backend.submit(job(name="new"))  # It is adopted, not created again as a PyTorchJob.
    assert not simulated.requests("DELETE")
    for name in ("new", "old"):
        backend.stop(name)
    assert backend.list_jobs() == []


def test_a_job_of_the_other_kind_is_replaced_by_one_of_the_preferred(knows, job, simulated):
    backend = knows("pytorchjobs", "trainjobs")
    connect_backend(simulated, [KINDS["trainjob"]]).submit(job())
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
def trainjobs(simulated):
    simulated.installed = {"trainjobs"}
    return connect_backend(simulated, [KINDS["trainjob"]])


def runtimes(cluster):
    return [body for (resource, *_), body in list(cluster.objects.items()) if resource == RUNTIMES]


def owners(cluster):
    (runtime,) = runtimes(cluster)
    return [(owner["kind"], owner["uid"]) for owner in runtime["metadata"].get("ownerReferences") or []]


def test_a_runtime_of_its_own_belongs_to_the_job_and_goes_with_it(trainjobs, job, simulated):
    trainjobs.submit(job(backoff=3))
    assert owners(simulated) == [("TrainJob", simulated.job("train")["metadata"]["uid"])]
    (runtime,) = runtimes(simulated)
    # With it a job that is deleted in the foreground would wait for ever.
    assert "blockOwnerDeletion" not in str(runtime)
    trainjobs.stop("train")
    assert not runtimes(simulated)


def test_a_job_that_is_refused_leaves_no_runtime(trainjobs, job, simulated):
    simulated.faults.append(Fault("POST", "/trainjobs", status=422, message="no such field"))
    with pytest.raises(ApiError, match="no such field"):
        trainjobs.submit(job(backoff=3))
    assert runtimes(simulated) == []
    assert simulated.job("train") is None


def test_the_runtime_of_a_deleted_job_is_taken_over_before_the_cluster_collects_it(trainjobs, job, simulated):
    simulated.collection_seconds = 0.3
    simulated.lives["train-node-0-0"] = lambda pod: (pod.run(), pod.exit(1))
    trainjobs.submit(job(backoff=3))
    while not trainjobs.status("train").phase.final:
        simulated.clock.sleep(0.01)
    trainjobs.submit(job(backoff=3))  # It failed: it is deleted and created again.
    simulated.clock.sleep(0.6)
    assert owners(simulated) == [("TrainJob", simulated.job("train")["metadata"]["uid"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    ['TrainingRuntime.trainer.kubeflow.org "NAME" not found: must be created', "runtime 'NAME' not found"],
    ids=["Trainer", "Kueue"],
)
def test_a_runtime_that_a_controller_has_not_seen_yet_is_waited_for(trainjobs, job, simulated, message):
    trainjobs.submit(job(backoff=3))
    (runtime,) = runtimes(simulated)
    words = message.replace("NAME", runtime["metadata"]["name"])
    trainjobs.stop("train")
    simulated.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=2))
    trainjobs.submit(job(backoff=3))
    assert owners(simulated) == [("TrainJob", simulated.job("train")["metadata"]["uid"])]
    trainjobs.stop("train")
    simulated.faults.append(Fault("POST", "/trainjobs", status=403, message=words, times=10**6))
    with pytest.raises(ApiError, match="not found"):
        trainjobs.submit(job(backoff=3))
    assert runtimes(simulated) == []


@pytest.mark.parametrize("away", [0, 10**6], ids=["for a moment", "for long"])
def test_a_job_whose_answer_was_lost_owns_its_runtime(trainjobs, job, simulated, away):
    simulated.faults.append(Fault("POST", "/trainjobs", lost=True))
    simulated.faults.append(Fault("POST", "/trainjobs", drop=True, times=away))
    trainjobs.submit(job(backoff=3))
    assert owners(simulated) == [("TrainJob", simulated.job("train")["metadata"]["uid"])]


def test_a_runtime_that_may_not_be_patched_is_reported_and_the_job_runs(trainjobs, job, simulated, caplog):
    simulated.denied.add(("patch", RUNTIMES))
    trainjobs.submit(job(backoff=3))
    assert simulated.job("train")
    assert "stays when its job is deleted" in caplog.text
