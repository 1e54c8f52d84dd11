"""The training of a run by a launcher: what is asked of it, and what is refused before."""

import json

import pytest
from small_index import index

from components import launchers, training
from components.jobs import Request
from trainer import __main__, storage
from trainer.base.errors import ConfigError, LaunchError
from trainer.steps.manifests import Shards
from trainer.steps.train import result_uri

RUN = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "data" / "shards" / "f00d"
    folder.mkdir(parents=True)
    form = index({"train": 100}, categories=[{"id": 0, "name": "square"}], source="coco:/data/cards")
    (folder / "index.json").write_text(json.dumps(form))
    return Shards(
        data_root=str(tmp_path / "data"),
        uri=str(folder),
        fingerprint="f00d",
        samples={"train": 100},
        boxes={"train": 100},
        recipe="debug",
        overrides={},
    )


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The jobs that were launched, each of which writes its result."""
    jobs = []

    def run(launcher, job):
        jobs.append(job)
        storage.write_json(result_uri(str(tmp_path / "run")), {"metrics": {"coco/AP": 0.5}})

    monkeypatch.setattr(launchers, "run", run)
    return jobs


def request(tmp_path, **job):
    mounts = [{"claim": "scratch", "path": str(tmp_path)}]
    return Request("kubernetes", image="i:1", job={"mounts": mounts, **job}, run_id=RUN)


def test_a_job_trains_with_the_configuration_of_the_run(shards, launched, tmp_path):
    model = training.train(shards, Request(nproc=2), str(tmp_path / "run"))
    (job,) = launched
    assert job.nproc == 2 and model.config in job.command and model.metrics == {"coco/AP": 0.5}


@pytest.mark.parametrize("complete", [True, False])
def test_a_job_that_fails_after_the_training_was_complete_fails_nothing(
    shards, monkeypatch, tmp_path, complete
):
    """Its prediction may need more memory; `evaluate` predicts then."""

    def run(launcher, job):
        if complete:
            storage.write_json(result_uri(str(tmp_path / "run")), {"metrics": {"coco/AP": 0.5}})
        raise LaunchError("pod a was killed 3 times")

    monkeypatch.setattr(launchers, "run", run)
    if complete:
        model = training.train(shards, request(tmp_path), str(tmp_path / "run"))
        assert model.metrics == {"coco/AP": 0.5}
    else:
        with pytest.raises(LaunchError, match="killed"):
            training.train(shards, request(tmp_path), str(tmp_path / "run"))


def test_what_cannot_run_is_refused(shards, launched, tmp_path):
    for bad in (Request(nproc=-1), Request("slurm")):
        with pytest.raises(ConfigError):
            training.train(shards, bad, str(tmp_path / "run"))
    assert not launched and not (tmp_path / "run").exists()


def test_folders_that_the_pods_cannot_access_are_refused(shards, launched, tmp_path):
    outside = Request("kubernetes", image="registry/kubedet:1", claim="sets", run_id=RUN)
    with pytest.raises(ConfigError) as caught:
        training.train(shards, outside, str(tmp_path / "run"))
    assert f"data_root: {shards.uri}" in str(caught.value)
    assert f"output: {tmp_path / 'run'}" in str(caught.value)
    assert not launched
    # The job itself may mount a volume there.
    training.train(shards, request(tmp_path), str(tmp_path / "run"))
    assert launched[0].mounts[0].claim == "scratch"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ["--heartbeat-timeout", "240"]),
        ({"launcher_timeout": 60}, ["--heartbeat-timeout", "60"]),
        ({"launcher_timeout": 0}, None),
    ],
    ids=str,
)
def test_a_job_in_pods_ends_without_its_launcher(shards, launched, tmp_path, fields, options):
    training.train(shards, request(tmp_path, **fields), str(tmp_path / "run"))
    command = list(launched[0].command)
    launch, _, train = " ".join(command).partition(" -- ")
    assert train.startswith("train --predict --config ")
    heartbeat = ["--heartbeat", str(tmp_path / "run" / "launcher.json")]
    assert launch.split()[4:] == ([] if options is None else heartbeat + options)
    main = __main__._parser().parse_args(command[3:])
    assert main.arguments[0] == "train"
