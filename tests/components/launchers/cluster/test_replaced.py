"""Jobs that others delete, replace, recreate or started."""

import threading
import time
from dataclasses import replace

import pytest
from fake_cluster import gone
from fake_pod import endless, ends
from kinds import both
from patience import until

from components.launchers.cluster.backend import ClusterBackend
from trainer.base.errors import LaunchError


@pytest.fixture
def once_it_runs(run):
    """Do something as soon as the run has told that the job runs."""

    def begin(act):
        def wait():
            until(lambda: any("running" in line for line in run.lines))
            act()

        threading.Thread(target=wait, daemon=True).start()

    return begin


@pytest.fixture
def patient(backend, timings):
    """The backend, which gives another job of the name time to appear: that takes no longer than it does."""
    backend.timings = replace(timings, replaced=30.0)
    return backend


def test_a_job_that_is_deleted_is_reported(run, once_it_runs, fake_cluster, master):
    fake_cluster.lives[master] = endless
    once_it_runs(lambda: fake_cluster.delete_job("default", "train"))
    with pytest.raises(LaunchError, match="the job train is gone"):
        run()


@both
def test_a_job_that_another_specification_replaces_is_reported(
    run, patient, once_it_runs, job, fake_cluster, master
):
    fake_cluster.lives[master] = endless

    def replace_it():
        fake_cluster.delete_job("default", "train")
        time.sleep(0.2)
        ClusterBackend.connect().submit(job(env={"A": "other"}))

    once_it_runs(replace_it)
    with pytest.raises(LaunchError, match="was replaced by another specification of that name") as error:
        run()
    assert "another name" in error.value.fix and "stop" not in error.value.fix
    assert not gone(fake_cluster) and not fake_cluster.requests("DELETE")


@both
def test_the_same_job_recreated_by_another_launcher_is_followed(
    run, patient, once_it_runs, fake_cluster, master
):
    fake_cluster.lives[master] = [endless, ends(0, "anew")]

    def replace_it():
        old = fake_cluster.job("train")
        fake_cluster.trainer.collection_seconds = 60
        fake_cluster.delete_job("default", "train")
        fake_cluster.create_job("default", {**old, "metadata": dict(old["metadata"]), "status": {}})

    once_it_runs(replace_it)
    lines = run()
    assert "job train: succeeded" in lines and f"[{master}] anew" in lines
