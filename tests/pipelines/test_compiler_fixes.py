"""What is changed in a compiled pipeline: inputs that the compiler forgets, conditions that cost a pod."""

import yaml
from driver import refusals
from kfp import compiler, dsl

from pipelines.compile import inline_conditions, pass_parameters

IMAGE = "python:3.11"


@dsl.component(base_image=IMAGE)
def decide(text: str) -> str:
    return text


@dsl.component(base_image=IMAGE)
def act(text: str, number: int = 1):
    pass


def compiled(tmp_path, pipeline):
    compiler.Compiler().compile(pipeline, str(tmp_path / "p.yaml"))
    return next(yaml.safe_load_all((tmp_path / "p.yaml").read_text()))


def test_a_request_reaches_every_graph_around_it(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline(cpu: str = "1", word: str = "go"):
        with dsl.ExitHandler(act(text="end")), dsl.If(word == "go"):
            act(text="a").set_cpu_request(cpu)
            act(text="b")

    spec = compiled(tmp_path, pipeline)
    assert any("the graph has no input" in line for line in refusals(spec))
    pass_parameters(spec)
    assert refusals(spec) == []


def test_a_condition_around_one_task_is_that_tasks_own(tmp_path):
    @dsl.pipeline(name="p")
    def pipeline(text: str = "x", number: int = 3):
        with dsl.ExitHandler(act(text="end")):
            first = decide(text=text)
            with dsl.If(first.output == "yes"):
                act(text=text, number=number).after(decide(text="inside"))  # two tasks: it stays
            with dsl.If(first.output == "no"):
                act(text=text, number=number)

    spec = compiled(tmp_path, pipeline)
    before = [name for name, component in spec["components"].items() if "dag" in component]
    inline_conditions(spec)
    after = [name for name, component in spec["components"].items() if "dag" in component]
    assert len(before) == 3 and len(after) == 2
    (graph,) = [c["dag"]["tasks"] for n, c in spec["components"].items() if n.startswith("comp-exit-handler")]
    (task,) = [t for t in graph.values() if "condition" in t.get("triggerPolicy", {}) and "dag" not in
               spec["components"][t["componentRef"]["name"]]]  # fmt: skip
    assert task["triggerPolicy"]["condition"].endswith("== 'no'")
    assert len(task["dependentTasks"]) == 1
    bound = task["inputs"]["parameters"]
    assert bound["number"] == {"componentInputParameter": "pipelinechannel--number"}
    assert refusals(spec) == []
