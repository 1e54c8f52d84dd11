"""Download and sharding by a job: what it is asked for, and that the step then finds the work finished."""

import pytest

from components import launchers
from components.data_job import DataJob
from components.jobs import job_name
from trainer import storage
from trainer.base.errors import ConfigError
from trainer.steps.download import download
from trainer.steps.shard import shard

RUN = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


@pytest.fixture
def launched(monkeypatch):
    jobs = []
    monkeypatch.setattr(launchers, "run", lambda launcher, job: jobs.append(job))
    return jobs


def test_a_job_has_the_queue_of_the_training_but_neither_its_gpus_nor_its_nodes(launched, tmp_path):
    fields = {
        "kueue_queue": "gpus",
        "env": {"A": "b"},
        "memory_limit": "512Gi",
        "node_selector": {"gpu": "h100"},
        "network": {"profile": "rdma", "hca": "mlx5_0"},
        "elastic": {"min_nodes": 1, "max_nodes": 4},
        "mounts": [{"claim": "sets", "path": str(tmp_path)}],
    }
    data = DataJob(3, "kubernetes", fields, "", "keys", RUN, "registry/steps:1", "2", "8Gi")
    data.make_launch("shard", str(tmp_path))(("shard", "--raw", "x"))
    (job,) = launched
    assert (job.name, job.nodes, job.processes, job.gpus) == (job_name(RUN, "shard"), 3, 1, 0)
    assert (job.kueue_queue, job.image, job.cpu_request, job.memory_request) == (
        *("gpus", "registry/steps:1", "2", "8Gi"),
    )
    assert not job.node_selector and not job.memory_limit and not job.elastic and job.env["A"] == "b"
    assert (
        job.network.profile != "rdma"
        and "--heartbeat" in job.command
        and job.command[-3:] == (*("shard", "--raw", "x"),)
    )
    assert storage.list_files(str(tmp_path)) == []


def test_one_worker_is_the_step_itself_and_less_is_refused(launched, tmp_path):
    assert DataJob(1).make_launch("download", str(tmp_path)) is None
    with pytest.raises(ConfigError):
        DataJob(0).make_launch("download", str(tmp_path))
    unreachable = DataJob(2, "kubernetes", run_id=RUN, image="registry/steps:1", cpu="1", memory="1Gi")
    with pytest.raises(ConfigError, match="data_root"):
        unreachable.make_launch("download", str(tmp_path))(("download",))
    assert not launched


@pytest.mark.slow
def test_a_step_finds_what_the_processes_of_its_job_have_done(tmp_path, caplog):
    source, root = "sample:images=24,size=96,seed=4", str(tmp_path / "data")
    overrides = {"data.processes": 1, "data.shard_bytes": 20_000}
    data = DataJob(2, "local")
    raw = download(source, root, "debug", overrides)
    with caplog.at_level("INFO"):
        shards = shard(raw, data.make_launch("shard", root))
    assert "are there already" in caplog.text
    alone = shard(download(source, str(tmp_path / "alone"), "debug", overrides))
    assert (shards.fingerprint, shards.samples) == (alone.fingerprint, alone.samples)
