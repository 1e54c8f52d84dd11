"""Compiles the pipeline to YAML."""

import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from kfp import compiler

from pipelines.pipeline import make_pipeline
from pipelines.pipeline_run import CompileOptions
from trainer import storage
from trainer.base.temporary_folders import temporary_folder

Spec: TypeAlias = dict[str, Any]
"""A compiled pipeline's first document, or a part of it; functions change it."""

_PARAMETER_REFERENCE = re.compile(r"inputs\.parameter_values\['([^']+)'\]")
_INPUT_PARAMETER = "componentInputParameter"


def compile_pipeline(path: Path, options: CompileOptions | None = None) -> None:
    """Compile the pipeline to a YAML file, which is replaced atomically."""
    text = compile_to_yaml(options or CompileOptions())
    storage.write_bytes(str(path.absolute()), text.encode(), sync=False)


@cache
def compile_to_yaml(options: CompileOptions) -> str:
    """Return the pipeline as YAML; compiling takes a second."""
    with temporary_folder() as folder:
        path = folder / "pipeline.yaml"  # kfp selects the format by the suffix.
        compiler.Compiler().compile(make_pipeline(options), str(path))
        text = path.read_text()
    # The comment at the beginning describes the parameters.
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    documents = list(yaml.safe_load_all(text))
    inline_conditions(documents[0])
    return head + yaml.safe_dump_all(documents, sort_keys=True)


def inline_conditions(spec: Spec) -> None:
    """Replace every conditional graph of one task with that task, under the same condition.

    kfp compiles `dsl.If` to a group, which has its own pod (kubeflow/pipelines#10013: about 10 s). Its
    specification also allows a condition for a single task (PipelineTaskSpec.trigger_policy).
    """
    components = spec.get("components", {})
    for graph in [spec["root"], *list(components.values())]:
        tasks = graph.get("dag", {}).get("tasks", {})
        for name, outer in list(tasks.items()):
            reference = outer["componentRef"]["name"]
            inner = components.get(reference, {}).get("dag", {}).get("tasks", {})
            if "condition" not in outer.get("triggerPolicy", {}) or len(inner) != 1:
                continue
            del tasks[name]
            ((own, task),) = inner.items()
            group, outer_inputs = components.pop(reference), outer.get("inputs", {})
            for kind, key in (("parameters", _INPUT_PARAMETER), ("artifacts", "componentInputArtifact")):
                for item, source in task.get("inputs", {}).get(kind, {}).items():
                    if key in source:
                        task["inputs"][kind][item] = outer_inputs[kind][source[key]]
            read = task.setdefault("inputs", {}).setdefault("parameters", {})
            component = components[task["componentRef"]["name"]]
            definitions = component["inputDefinitions"].setdefault("parameters", {})
            for item in _PARAMETER_REFERENCE.findall(outer["triggerPolicy"]["condition"]):
                # Only KFP's driver reads this input, to evaluate the condition.
                read[item] = outer_inputs["parameters"][item]
                definitions[item] = group["inputDefinitions"]["parameters"][item] | {"isOptional": True}
            before = {*outer.get("dependentTasks", []), *task.get("dependentTasks", [])}
            tasks[own] = task | {"triggerPolicy": outer["triggerPolicy"], "dependentTasks": sorted(before)}
