"""The compiled file against the rules of the real driver, which no local runner applies."""

import pytest
import yaml
from driver import refusals
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
