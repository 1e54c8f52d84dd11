"""What steps use is kept below the data root, also of a try that was killed, and read again."""

import os
import signal
import time
from pathlib import Path

import pytest

from components import environment, jobs, preparation, steps, usage
from components.jobs import Request
from trainer import storage
from trainer.launching.usage import FOLDER

ONE_PROCESS = {"data.processes": 1, "data.threads": 1}
RUN = "0b5f6a3e-1111-4222-8333-444455556666"


@pytest.fixture(autouse=True)
def of_a_run(monkeypatch):
    monkeypatch.setenv(environment.RUN_ID, RUN)
    for name in ("KUBERNETES_SERVICE_HOST", steps.TRIES_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def work(data_root, **settings):
    usage.keep(data_root, **settings)
    return "done"


def test_a_step_of_a_run_leaves_a_record(tmp_path):
    assert steps.run("prepare", f"{__name__}:work", str(tmp_path)) == "done"
    (record,) = usage.of_run(str(tmp_path), RUN)
    assert (record.run, record.step, record.ended, record.nodes) == (RUN, "prepare", True, 1)
    (file,) = (tmp_path / "usage" / RUN).iterdir()
    assert file.name.startswith("prepare-") and file.suffix == ".json"


def test_what_belongs_to_no_run_leaves_none(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.RUN_ID)
    steps.run("prepare", f"{__name__}:work", str(tmp_path))
    preparation.prepare(
        "sample:images=6,size=96", "debug", ONE_PROCESS, str(tmp_path), "", str(tmp_path / "page")
    )
    assert not (tmp_path / "usage").exists()


def killed_once(data_root):
    usage.keep(data_root)
    killed = Path(data_root) / "killed"
    if not killed.exists():
        while not storage.list_files(storage.join(data_root, "usage", RUN)):  # those that are whole
            time.sleep(0.01)
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_try_that_was_killed_counts(tmp_path, monkeypatch):
    (tmp_path / "usage" / RUN).mkdir(parents=True)
    monkeypatch.setattr(steps.Patience, "here", classmethod(lambda cls: cls(tries=3, first_wait=0.01)))
    steps.run("prepare", f"{__name__}:killed_once", str(tmp_path))
    records = sorted(usage.of_run(str(tmp_path), RUN), key=lambda record: record.ended)
    assert [record.ended for record in records] == [False, True]


def looks_back(data_root):
    usage.keep(data_root)
    time.sleep(0.05)
    (record,) = usage.of_run(data_root, RUN)
    return record.seconds


def test_a_step_that_goes_on_sees_what_it_has_used_up_to_now(tmp_path):
    assert steps.run("evaluate", f"{__name__}:looks_back", str(tmp_path)) >= 0.05


def test_a_damaged_record_is_left_out(tmp_path, capfd):
    steps.run("prepare", f"{__name__}:work", str(tmp_path))
    folder = tmp_path / "usage" / RUN
    (folder / "train-x.json").write_text('{"kind": "usage"')
    (folder / "note.txt").write_text("")
    assert len(usage.of_run(str(tmp_path), RUN, "another", "")) == 1
    said = capfd.readouterr().err
    assert "train-x.json" in said and "note.txt" not in said


def test_the_nodes_of_a_job_are_told_where_to_keep_theirs():
    parameters = {"launcher": "pytorchjob", "nproc": "2", "nodes": "1", "gpus": "0", "image": "kubedet:1"}
    request = Request.of(parameters, usage=f"s3://bucket/kubedet/usage/{RUN}", run_id=RUN)
    assert request.spec(("train",)).env[FOLDER] == f"s3://bucket/kubedet/usage/{RUN}"
    assert request.processes == 2
    assert FOLDER not in Request.of(parameters, run_id=RUN).spec(("train",)).env
    assert jobs.name_of(RUN) in request.spec(("train",)).name
