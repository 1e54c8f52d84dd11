"""Which kind a new job gets, and which kind a job has."""

import logging

import pytest
from fake_pod import endless

from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError
from components.launchers.cluster.kinds import KINDS
from trainer.base.errors import ConfigError


@pytest.fixture
def knows(fake_cluster, timings):
    """Let the fake cluster know some kinds; returns a backend of whatever there is."""

    def install(*plurals):
        fake_cluster.installed = set(plurals)
        fake_cluster.lives |= {"train-master-0": endless, "train-node-0-0": endless}
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
    fake_cluster.lives |= {"old-master-0": endless, "new-node-0-0": endless}
    ClusterBackend.connect(timings=timings, kinds=[backend.kinds.possible[0]]).submit(job(name="old"))
    ClusterBackend.connect(timings=timings, kinds=[backend.kinds.possible[1]]).submit(job(name="new"))
    assert {(status.name, status.kind) for status in backend.list_jobs()} == {
        ("old", "PyTorchJob"),
        ("new", "TrainJob"),
    }
    assert backend.status("new").kind == "TrainJob" and len(backend.status("new").pods) == 1
    backend.submit(job(name="new"))  # It is taken up, and not made anew as a PyTorchJob.
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
