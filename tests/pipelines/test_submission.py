"""A submission is checked before it is sent, and shown as equivalent `kfp` commands."""

import shlex
from dataclasses import fields

import pytest
from kfp.cli.utils.parsing import parse_parameter_value

from pipelines import Access
from pipelines.parameters import LARGE, MEDIUM, SMALL
from pipelines.pipeline import TRAINING_PARAMETERS, default_parameters
from pipelines.pipeline_run import CompileOptions, PipelineRun
from pipelines.submission import Submission, format_argument
from trainer.base.errors import ConfigError

ROOT = {"data_root": "s3://bucket/root"}


def submission(**parameters):
    return Submission("nightly", "sets", {"data_root": "s3://bucket/root", **parameters})


def test_what_can_be_run_passes():
    submission().check()
    submission(
        recipe="coco_r50",
        overrides={"train.epochs": 3},
        gate="coco/AP50 >= 0.3",
        nodes=2,
        gpus=8,
        job={"memory_limit": "64Gi"},
        claim="sets",
        output="/data/runs/a",
        source="coco:/data/coco",
        signing="keys",
        registry="https://registry.example",
    ).check()
    Submission("a", "b", {"claim": "sets"}).check()
    submission(launcher="local", nproc=2, source="https://host/annotations.json").check()
    submission(overrides={"train.minutes": 4}).check()
    for source in ("coco:2017", "coco:2017,base=s3://mirror", "openimages:pixels=s3://mirror", "sample"):
        submission(source=source).check()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"recipe": "nope"}, "unknown recipe 'nope'"),
        ({"overrides": {"train.epoch": 3}}, "did you mean train.epochs"),
        ({"launcher": "slurm"}, "no launcher 'slurm'; use one of: local, kubernetes"),
        ({"job": {"memory_limit": "lots"}}, "job.memory_limit: "),
        ({"step_memory": "0"}, "step_memory: '0' is less than 64Mi"),
        ({"claim": "my claim"}, "claim: "),
        ({"registry": "registry:8080"}, "the model registry 'registry:8080' is not a URL"),
        ({"data_root": ""}, "data_root: is missing"),
        ({"data_root": "./data"}, "data_root: pods cannot access ./data: use a bucket, or a volume"),
        ({"data_root": "/home/me", "claim": "sets"}, "use a bucket or a path below /data"),
        ({"source": "coco:/home/me/coco"}, "source: pods cannot access /home/me/coco"),
        ({"source": "coco:2017,base=s3://ab/x"}, "source: s3://ab/x: invalid bucket name 'ab'"),
        ({"overrides": {"model.weights": "s3://a..b/w.pt"}}, "invalid bucket name 'a..b'"),
    ],
)
def test_what_cannot_be_run_is_refused(parameters, message):
    with pytest.raises(ConfigError) as caught:
        submission(**parameters).check()
    assert f"  {message}" in str(caught.value) or message in str(caught.value)


def test_all_problems_are_in_one_error():
    wrong = {"recipe": "nope", "gate": "x", "nodes": 0, "credentials": "", "output": "/x"}
    with pytest.raises(ConfigError) as caught:
        Submission("a", "b", wrong).check()
    assert len(caught.value.message.splitlines()) == 1 + 6


@pytest.mark.parametrize(
    "value",
    ["s3://b/x", "", "20261121", "1e3", "true", "nan", "null", "[1]", '"quoted"', "coco/AP50 >= 0.5", "it's",
     2, 0.5, {"train.epochs": 3, "data.classes": ["a b"]}, [1, "2"]],
)  # fmt: skip
def test_kfp_reads_the_same_value(value):
    read = parse_parameter_value(format_argument(value))
    assert read == value and type(read) is type(value)


def test_the_commands_of_kfp(monkeypatch):
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "s3cr3t")
    access = Access(host="https://kf/pipeline", namespace="team")
    parameters = {**ROOT, "claim": "sets", "overrides": {"train.epochs": 3}}
    compiled, run = Submission("nightly", "sets", parameters, {"deadline": 60, "ttl": 5}).commands(access)
    assert compiled == "kubedet cluster compile --volume --deadline 60 --ttl 5 --output pipeline.yaml"
    words = shlex.split(run)
    assert words[:7] == ["kfp", "--endpoint", "https://kf/pipeline", "--namespace", "team", "run", "create"]
    assert 'overrides={"train.epochs": 3}' in words and "claim=sets" in words
    assert "s3cr3t" not in run


def test_the_package_is_compiled_with_the_options_of_its_parameters():
    volume = submission(claim="sets").package()
    assert "claim" in volume["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert "kubernetes" in volume["platform_spec"]["platforms"]
    shards = Submission("a", "b", ROOT, {"deadline": 2, "until": "shards"})
    shards.check()
    assert shards.options == CompileOptions(deadline=2, until="shards")
    assert submission(min_new_images=1).options == CompileOptions(conditional=True)


@pytest.mark.parametrize(("options", "kind"), [({"until": "shards"}, "run until"), ({"trials": 2}, "search")])
def test_parameters_without_effect_are_refused_by_name(options, kind):
    defaults = default_parameters(volume=False)
    values = {name: defaults[name] for name in TRAINING_PARAMETERS if not name.startswith("min_")}
    with pytest.raises(ConfigError) as caught:
        Submission("a", "b", ROOT | values, options).check()
    lines = caught.value.message.splitlines()
    assert all(any(f"{name}: has no effect in a {kind}" in line for line in lines) for name in values)


def test_a_search_is_checked_before_anything_is_sent():
    searched = ROOT | {"space": "{train.rate: {low: 1, high: 2}}", "study": "../a"}
    with pytest.raises(ConfigError, match=r"train\.rate"):
        Submission("a", "b", searched, {"trials": 2}).check()
    searched |= {"space": "{train.lr: {low: 0.1, high: 0.2}}"}
    with pytest.raises(ConfigError, match="not a valid name"):
        Submission("a", "b", searched, {"trials": 2}).check()
    searched |= {"study": "first", "overrides": {"train.minutes": 3}}
    Submission("a", "b", searched, {"trials": 2, "parallelism": 2, "gpus": 1}).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 1}, "gpus has no effect without trials"),
        ({"trials": 2, "until": "shards"}, "until shards cannot be combined with a search"),
        ({"parallelism": 4}, "parallelism has no effect without trials"),
        ({"until": "train"}, "until 'train' is not a step that a run can end with"),
        ({"deadline": -1, "ttl": -2}, "deadline -1 is less than zero; ttl -2 is less than zero"),
    ],
)
def test_options_that_cannot_be_compiled_are_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        Submission("a", "b", ROOT, options).check()
    assert message in str(caught.value)


def test_a_run_has_the_parameters_of_the_pipeline():
    names = {field.name for field in fields(PipelineRun)}
    assert set(default_parameters(volume=False)) <= names


@pytest.mark.parametrize(
    ("source", "requests"),
    [("sample", SMALL), ("s3://bucket/x", MEDIUM), ("coco:2017,base=s3://mirror", LARGE)],
)
def test_the_requests_of_steps_follow_from_the_source(source, requests):
    run = PipelineRun(data_root="s3://bucket/root", source=source)
    parameters = Submission.make(run, "a").parameters
    assert (parameters["step_cpu"], parameters["step_memory"]) == requests
