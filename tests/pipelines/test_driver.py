"""The compiled file against the rules of the real driver, which no local runner applies."""

import pytest
import yaml
from driver import refusals, takes
from kfp import compiler, dsl

from pipelines.compile import compile_pipeline
from pipelines.forms import Form

FORMS = {
    "plain": Form(),
    "volume": Form(volume=True),
    "shared": Form(partitions=3),
    "shared by many": Form(partitions=20, conditional=True),
    "data alone": Form(until="shards"),
    "search": Form(trials=3, parallelism=2),
    "search on a volume, with GPUs": Form(trials=3, gpus=2, volume=True),
    "data alone, shared": Form(until="shards", partitions=2, volume=True, deadline=60, ttl=60),
}


@pytest.mark.parametrize(
    ("declared", "taken"),
    [
        ("STRING", {"string", "number", "bool", "list", "struct"}),
        ("NUMBER_INTEGER", {"number"}),
        ("NUMBER_DOUBLE", {"number"}),
        ("BOOLEAN", {"bool"}),
        ("LIST", {"list"}),
        ("STRUCT", {"struct"}),
        ("TASK_FINAL_STATUS", {"struct"}),
    ],
)
def test_what_the_driver_takes(declared, taken):
    """Each pair was tried on Kubeflow Pipelines 2.17.0, or read in its driver."""
    kinds = {"string", "number", "bool", "list", "struct"}
    assert {kind for kind in kinds if takes(declared, kind)} == taken


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_refuses_nothing_of_ours(tmp_path, form):
    compile_pipeline(tmp_path / "p.yaml", form)
    assert refusals(*yaml.safe_load_all((tmp_path / "p.yaml").read_text())) == []


@dsl.component(base_image="python:3.11")
def plan() -> list:
    return [{"partition": 0}]


@dsl.component(base_image="python:3.11")
def fetch(part: dict) -> dict:
    return part


@dsl.component(base_image="python:3.11")
def take(text: str, number: int):
    pass


def compiled(tmp_path, pipeline):
    compiler.Compiler().compile(pipeline, str(tmp_path / "p.yaml"))
    return refusals(*yaml.safe_load_all((tmp_path / "p.yaml").read_text()))


def test_it_finds_the_fault_that_ended_every_run(tmp_path):
    """An item of a list has no type of its own: the compiler says text, and a mapping is refused."""

    @dsl.pipeline(name="p")
    def pipeline():
        with dsl.ParallelFor(plan().output) as part:
            fetch(part=part)

    (refusal,) = compiled(tmp_path, pipeline)
    assert refusal.endswith("part: type mismatch: expect STRUCT, got string")


def test_a_number_given_as_text_is_refused_and_a_text_given_as_number_is_not(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline(count: int = 1):
        take(text=dsl.PIPELINE_JOB_ID_PLACEHOLDER, number=count)

    assert compiled(tmp_path, pipeline) == []
    spec, *platform = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    inputs = spec["root"]["dag"]["tasks"]["take"]["inputs"]["parameters"]
    inputs["number"], inputs["text"] = inputs["text"], inputs["number"]
    assert refusals(spec, *platform) == [
        "root, take: number: type mismatch: expect NUMBER_INTEGER, got string"
    ]


@dsl.component(base_image="python:3.11")
def take_request(request: dict):
    pass


def test_a_text_and_a_number_can_stand_in_a_mapping_but_no_mapping(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline(count: int = 1, name: str = "a", more: dict = {}):  # noqa: B006
        take_request(request={"count": count, "name": name})
        take_request(request={"more": more})

    problems = compiled(tmp_path, pipeline)
    assert problems == [
        "root, take-request-2: request: pipelinechannel--more is a struct, which cannot stand within a value"
    ]


def test_the_runs_id_cannot_stand_in_a_mapping(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline():
        take_request(request={"run": dsl.PIPELINE_JOB_ID_PLACEHOLDER})

    assert compiled(tmp_path, pipeline) == [
        "root, take-request: request: nobody replaces {{$.pipeline_job_uuid}} within a value"
    ]


def test_what_stands_in_a_mapping_must_be_given(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline(count: int = 1):
        take_request(request={"count": count})

    assert compiled(tmp_path, pipeline) == []
    spec = yaml.safe_load((tmp_path / "p.yaml").read_text())
    del spec["root"]["dag"]["tasks"]["take-request"]["inputs"]["parameters"]["pipelinechannel--count"]
    assert refusals(spec) == ["root, take-request: request: the step has no input pipelinechannel--count"]
