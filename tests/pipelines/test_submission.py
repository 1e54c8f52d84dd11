"""What is asked of a cluster is checked before it is sent, and `kfp` is shown to do the same."""

import shlex

import pytest
from kfp.cli.utils.parsing import parse_parameter_value

from pipelines.access import Access
from pipelines.forms import Form
from pipelines.parameters import TRAINING
from pipelines.submission import Submission, argument
from trainer.base.errors import ConfigError

ROOT = {"data_root": "s3://bucket/root"}


def submission(**parameters):
    return Submission("nightly", "sets", {"data_root": "s3://bucket/root", **parameters})


def test_what_can_be_run_passes():
    submission().check()
    submission(
        recipe="coco_r50", overrides={"train.epochs": 3}, gate="coco/AP50 >= 0.3", nodes=2, gpus=8,
        job={"memory_limit": "64Gi"}, claim="sets", output="/data/runs/a", source="coco:/data/coco",
        data_version="[[ScheduledTime]]", signing="keys", registry="https://registry.example",
    ).check()  # fmt: skip
    Submission("a", "b", {"claim": "sets"}).check()
    submission(launcher="local", nproc=2, source="https://host/annotations.json").check()
    submission(launcher="local", overrides={"train.minutes": 4}).check()
    submission(overrides={"train.minutes": 0}).check()
    for source in ("coco:2017", "coco:2017,base=s3://mirror", "openimages:pixels=s3://mirror", "sample"):
        submission(source=source).check()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"recipe": "nope"}, "no recipe 'nope'"),
        ({"overrides": {"train.epoch": 3}}, "did you mean train.epochs"),
        ({"overrides": {"train.minutes": 4}}, "train.minutes: means nothing to the launcher kubernetes"),
        ({"gate": "good"}, "gate rule 'good' cannot be read"),
        ({"launcher": "slurm"}, "no launcher 'slurm'; use one of: local, kubernetes"),
        ({"nodes": 0}, "nodes: "),
        ({"launcher": "local", "gpus": 2}, "gpus: means nothing to the launcher local"),
        ({"job": {"memory_limit": "lots"}}, "job.memory_limit: "),
        ({"job": {"nodes": 3}}, "job.nodes: is a parameter of its own"),
        ({"step_cpu": "many"}, "step_cpu: 'many' is not an amount"),
        ({"step_memory": "0"}, "step_memory: '0' is less than 64Mi"),
        ({"data_version": "a/b"}, "data_version 'a/b' cannot be a name"),
        ({"credentials": "A_B"}, "credentials: "),
        ({"claim": "my claim"}, "claim: "),
        ({"signing": "My_key"}, "signing: "),
        ({"notify": "My_hook"}, "notify: "),
        ({"registry": "registry:8080"}, "the model registry 'registry:8080' is no URL"),
        ({"data_root": ""}, "data_root: is missing"),
        ({"data_root": "./data"}, "data_root: no pod finds ./data: use a bucket, or a volume"),
        ({"data_root": "/home/me", "claim": "sets"}, "use a bucket or a path below /data"),
        ({"data_root": "/database", "claim": "sets"}, "data_root: no pod finds /database"),
        ({"output": "/runs"}, "output: no pod finds /runs"),
        ({"source": "coco:/home/me/coco"}, "source: no pod finds /home/me/coco"),
        ({"source": "openimages:images=/home/me/ids.txt"}, "source: no pod finds /home/me/ids.txt"),
        ({"source": "openimages:split=val"}, "source openimages: cannot use 'split=val'; parameters: "),
        ({"source": "labelme:s3://bucket/x"}, "unknown kind 'labelme'; use sample, "),
        (
            {"data_root": "s3://a..b/x"},
            "data_root: s3://a..b/x: no bucket can be named 'a..b'",
        ),
        ({"output": "minio://-/x"}, "output: minio://-/x: no bucket can be named '-'"),
        ({"source": "coco:s3://ab/x"}, "source: s3://ab/x: no bucket can be named 'ab'"),
        ({"source": "coco:2017,base=s3://ab/x"}, "source: s3://ab/x: no bucket can be named 'ab'"),
        ({"overrides": {"model.weights": "s3://a..b/w.pt"}}, "no bucket can be named 'a..b'"),
        ({"overrides": {"evaluation.baseline": "s3://a..b/w"}}, "no bucket can be named 'a..b'"),
    ],
)
def test_what_cannot_be_run_is_refused(parameters, message):
    with pytest.raises(ConfigError) as caught:
        submission(**parameters).check()
    assert f"  {message}" in str(caught.value) or message in str(caught.value)


def test_a_name_that_amazon_refuses_is_told_unless_the_store_is_another(monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(ConfigError, match=r"data_root: s3://My_Bucket/x: .*set AWS_ENDPOINT_URL"):
        submission(data_root="s3://My_Bucket/x").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    submission(data_root="s3://My_Bucket/x").check()


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
    compiled, run = submission(claim="sets", overrides={"train.epochs": 3}).commands(access)
    assert compiled == "kubedet cluster compile --volume --output pipeline.yaml"
    words = shlex.split(run)
    assert words[:7] == ["kfp", "--endpoint", "https://kf/pipeline", "--namespace", "team", "run", "create"]
    assert 'overrides={"train.epochs": 3}' in words and "claim=sets" in words
    assert "s3cr3t" not in run


def test_the_package_is_in_the_form_of_its_parameters():
    bucket, volume = submission().package(), submission(claim="sets").package()
    assert "claim" not in bucket["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert "claim" in volume["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert "kubernetes" in bucket["platform_spec"]["platforms"]


def test_the_package_has_the_form_that_is_asked_for():
    plain = Submission("a", "b", {**ROOT, "min_new_images": 1}).package()["pipeline_spec"]
    shards = Submission("a", "b", ROOT, {"partitions": 2, "until": "shards"})
    shards.check()
    spec = shards.package()["pipeline_spec"]
    assert shards.form == Form(partitions=2, until="shards")
    parameters = [set(item["root"]["inputDefinitions"]["parameters"]) for item in (plain, spec)]
    assert set(TRAINING) <= parameters[0] and not set(TRAINING) & parameters[1]
    assert parameters[1] < parameters[0]


@pytest.mark.parametrize(
    ("form", "what"), [({"until": "shards"}, "run until shards"), ({"trials": 2}, "search")]
)
@pytest.mark.parametrize("name", TRAINING)
def test_what_a_form_has_no_use_for_is_refused_by_name(name, form, what):
    values = {"nodes": 2, "nproc": 2, "gpus": 1, "job": {}, "launcher": "local"}
    values |= {"min_new_images": 1, "min_drift": 0.1}
    value = values.get(name, "x")
    with pytest.raises(ConfigError, match=f"{name}: means nothing in a {what}|conditional means nothing"):
        Submission("a", "b", {"data_root": "s3://bucket/r", name: value}, form).check()


def test_a_search_is_checked_before_anything_is_sent():
    searched = {"data_root": "s3://bucket/r", "space": "{train.rate: {low: 1, high: 2}}", "study": "../a"}
    with pytest.raises(ConfigError) as caught:
        Submission("a", "b", searched, {"trials": 2}).check()
    assert "train.rate" in str(caught.value)
    searched |= {"space": "{train.lr: {low: 0.1, high: 0.2}}"}
    with pytest.raises(ConfigError, match="cannot be a folder's"):
        Submission("a", "b", searched, {"trials": 2}).check()
    searched |= {"study": "first", "overrides": {"train.minutes": 3}}
    Submission("a", "b", searched, {"trials": 2, "parallelism": 2, "gpus": 1}).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trials": -1}, "trials -1 is less than zero"),
        ({"gpus": 1}, "gpus means nothing without trials"),
        ({"trials": 2, "until": "shards"}, "until shards means nothing in a search"),
        ({"partitions": 300}, "partitions 300 is not from 1 to 256"),
        ({"parallelism": 4}, "parallelism means nothing without trials"),
        ({"parallelism": -1}, "parallelism -1 is less than zero"),
        ({"until": "train"}, "until 'train' is nowhere in the pipeline"),
        ({"deadline": -1, "ttl": -2}, "deadline -1 is less than zero; ttl -2 is less than zero"),
    ],
)
def test_a_form_that_is_none_is_refused(fields, message):
    with pytest.raises(ConfigError) as caught:
        Submission("a", "b", {"data_root": "s3://bucket/r"}, fields).check()
    assert message in str(caught.value)


def test_the_line_that_compiles_names_the_form():
    form = {"partitions": 2, "until": "shards", "deadline": 60, "ttl": 5}
    full = Submission("a", "b", {"claim": "c"}, form)
    assert full.commands(Access())[0] == (
        "kubedet cluster compile --volume --partitions 2 --until shards --deadline 60 --ttl 5 "
        "--output pipeline.yaml"
    )
    assert submission().commands(Access())[0] == "kubedet cluster compile --output pipeline.yaml"
