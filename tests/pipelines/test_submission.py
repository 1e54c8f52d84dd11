"""What is asked of a cluster is checked before it is sent, and `kfp` is shown to do the same."""

import shlex

import pytest
from kfp.cli.utils.parsing import parse_parameter_value

from pipelines.kubeflow import Access
from pipelines.submission import Submission, argument
from trainer.errors import ConfigError


def asked(**parameters):
    return Submission("nightly", "sets", {"data_root": "s3://bucket/root", **parameters})


def test_what_can_be_run_passes():
    asked().check()
    asked(
        recipe="coco_r50", overrides={"train.epochs": 3}, gate="coco/AP50 >= 0.3", nodes=2, gpus=8,
        job={"memory_limit": "64Gi"}, claim="sets", output="/data/runs/a", source="coco:/data/coco",
        data_version="[[ScheduledTime]]", signing="keys", registry="https://registry.example",
    ).check()  # fmt: skip
    Submission("a", "b", {"claim": "sets"}).check()
    asked(launcher="local", nproc=2, source="https://host/annotations.json").check()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"recipe": "nope"}, "no recipe 'nope'"),
        ({"overrides": {"train.epoch": 3}}, "did you mean train.epochs"),
        ({"gate": "good"}, "gate rule 'good' cannot be read"),
        ({"launcher": "slurm"}, "no launcher 'slurm'; use one of: local, kubernetes"),
        ({"nodes": 0}, "nodes: "),
        ({"launcher": "local", "gpus": 2}, "gpus: means nothing to the launcher local"),
        ({"job": {"memory_limit": "lots"}}, "job.memory_limit: "),
        ({"job": {"nodes": 3}}, "job.nodes: is a parameter of its own"),
        ({"partitions": 300}, "partitions 300 is not from 1 to 256"),
        ({"data_version": "a/b"}, "data_version 'a/b' cannot be a name"),
        ({"credentials": "A_B"}, "credentials: "),
        ({"claim": "my claim"}, "claim: "),
        ({"signing": "My_key"}, "signing: "),
        ({"registry": "registry:8080"}, "the model registry 'registry:8080' is no URL"),
        ({"data_root": ""}, "data_root: is missing"),
        ({"data_root": "./data"}, "data_root: no pod finds ./data: use a bucket, or a volume"),
        ({"data_root": "/home/me", "claim": "sets"}, "use a bucket or a path below /data"),
        ({"data_root": "/database", "claim": "sets"}, "data_root: no pod finds /database"),
        ({"output": "/runs"}, "output: no pod finds /runs"),
        ({"source": "coco:/home/me/coco"}, "source: no pod finds /home/me/coco"),
    ],
)
def test_what_cannot_be_run_is_refused(parameters, said):
    with pytest.raises(ConfigError) as caught:
        asked(**parameters).check()
    assert f"  {said}" in str(caught.value) or said in str(caught.value)


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Submission(
            "a", "b", {"recipe": "nope", "gate": "x", "nodes": 0, "credentials": "", "output": "/x"}
        ).check()
    assert len(caught.value.message.splitlines()) == 1 + 6


@pytest.mark.parametrize(
    "value",
    ["s3://b/x", "", "20261121", "1e3", "true", "nan", "null", "[1]", '"quoted"', "coco/AP50 >= 0.5", "it's",
     2, 0.5, {"train.epochs": 3, "data.classes": ["a b"]}, [1, "2"]],
)  # fmt: skip
def test_kfp_reads_the_same_value(value):
    read = parse_parameter_value(argument(value))
    assert read == value and type(read) is type(value)


def test_the_commands_of_kfp(monkeypatch):
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "s3cr3t")
    access = Access(host="https://kf/pipeline", namespace="team")
    compiled, run = asked(claim="sets", overrides={"train.epochs": 3}).commands(access)
    assert compiled == "kubedet compile --volume --output pipeline.yaml"
    words = shlex.split(run)
    assert words[:7] == ["kfp", "--endpoint", "https://kf/pipeline", "--namespace", "team", "run", "create"]
    assert 'overrides={"train.epochs": 3}' in words and "claim=sets" in words
    assert "s3cr3t" not in run


def test_the_package_is_in_the_form_of_its_parameters():
    bucket, volume = asked().package(), asked(claim="sets").package()
    assert "claim" not in bucket["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert "claim" in volume["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert "kubernetes" in bucket["platform_spec"]["platforms"]
