"""Writes the pipeline as the one file that a cluster takes and `kubedet run` executes.

The output of kfp's compiler (2.17.0) is corrected: missing inputs of graphs, needless pods of conditions.
"""

import contextlib
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from kfp import compiler

from pipelines import parameters
from pipelines.graph import pipeline
from pipelines.parameters import CompileOptions
from trainer.base.errors import StorageError

_PARAMETER_REFERENCE = re.compile(r"inputs\.parameter_values\['([^']+)'\]")
_INPUT_PARAMETER = "componentInputParameter"

Spec: TypeAlias = dict[str, Any]
"""A compiled pipeline's first document, or a part of it; functions change it."""


def compile_pipeline(path: Path, options: CompileOptions | None = None) -> None:
    """Compile the pipeline to a YAML file, which is replaced atomically."""
    # kfp decides on the format by the suffix.
    temporary = path.with_name(f".{path.stem}.tmp.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(pipeline(options or CompileOptions()), str(temporary))
        text = temporary.read_text()
        # The comment at the beginning lists the parameters for people.
        head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
        documents = list(yaml.safe_load_all(text))
        spec = documents[0]
        pass_parameters(spec)
        inline_conditions(spec)
        for component in spec["components"].values():
            inputs = component.get("inputDefinitions", {})
            for items in (inputs.get("parameters", {}), inputs.get("artifacts", {})):
                for name in items.keys() & parameters.STEP_ARGUMENTS.keys():
                    items[name]["description"] = parameters.STEP_ARGUMENTS[name]
        for name, parameter in spec["root"]["inputDefinitions"]["parameters"].items():
            if choices := parameters.TABLE[name].choices:
                parameter["literals"] = list(choices)  # kfp's compiler does not support them yet (2.17.0).
        temporary.write_text(head + yaml.safe_dump_all(documents, sort_keys=True))
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another place") from error
    finally:
        with contextlib.suppress(OSError):  # If no folder could be created there is no file.
            temporary.unlink()


def pass_parameters(spec: Spec) -> None:
    """Declare the missing inputs of graphs: parameters that their tasks take from the enclosing graph.

    The compiler leaves out parameters that are used only in resource requests. The driver then refuses a
    nested graph that refers to an input it does not get.
    """
    pipeline_parameters = spec["root"]["inputDefinitions"]["parameters"]
    components = spec.get("components", {})
    for _ in components:  # Each round gets at least one level nearer to the root.
        for graph in [spec["root"], *components.values()]:
            for task in graph.get("dag", {}).get("tasks", {}).values():
                inner = components[task["componentRef"]["name"]]
                tasks = inner.get("dag", {}).get("tasks", {}).values()
                given = [item for of in tasks for item in of.get("inputs", {}).get("parameters", {}).values()]
                needed = {item[_INPUT_PARAMETER] for item in given if _INPUT_PARAMETER in item}
                for name in needed - set(task.get("inputs", {}).get("parameters", {})):
                    outer = name.removeprefix("pipelinechannel--")
                    if outer not in pipeline_parameters:
                        continue  # The item of the graph's loop.
                    source = {_INPUT_PARAMETER: outer if graph is spec["root"] else name}
                    task.setdefault("inputs", {}).setdefault("parameters", {})[name] = source
                    definitions = inner["inputDefinitions"].setdefault("parameters", {})
                    definitions[name] = {"parameterType": pipeline_parameters[outer]["parameterType"]}


def inline_conditions(spec: Spec) -> None:
    """Replace every conditional graph of one task by that task, under the same condition.

    `dsl.If` compiles to a task that holds an inner graph, and a cluster starts a pod for each graph. The
    specification also allows a condition on the task itself (PipelineTaskSpec.trigger_policy in Kubeflow's
    pipeline_spec.proto), which the task's driver checks.
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
                # Only the driver reads it, for the condition.
                read[item] = outer_inputs["parameters"][item]
                definitions[item] = group["inputDefinitions"]["parameters"][item] | {"isOptional": True}
            before = {*outer.get("dependentTasks", []), *task.get("dependentTasks", [])}
            tasks[own] = task | {"triggerPolicy": outer["triggerPolicy"], "dependentTasks": sorted(before)}
