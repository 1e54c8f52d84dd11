"""What the driver of Kubeflow Pipelines refuses in a compiled pipeline, without a cluster.

The local runner hands every value on as it is. The real driver looks at what each input was declared to
be, and ends the run where a value is of another kind. Seen on 2.17.0 (backend/src/v2/driver/resolve.go): an
input that was declared as text takes everything, and makes text of it; any other takes its own kind alone.
"""

import json
import re

KINDS = {
    "STRING": "string", "NUMBER_INTEGER": "number", "NUMBER_DOUBLE": "number", "BOOLEAN": "bool",
    "LIST": "list", "STRUCT": "struct", "TASK_FINAL_STATUS": "struct", "TASK_CONFIG": "struct",
}  # fmt: skip
"""Declared types, and the kind of value that has passed such an input."""

_CONSTANTS = {str: "string", bool: "bool", int: "number", float: "number", list: "list", dict: "struct"}


_PLACEHOLDER = re.compile(r"\{\{\$.*?\}\}")
_INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")


def takes(declared, kind):
    return declared == "STRING" or KINDS[declared] == kind


def refusals(spec, platform=None):
    """Every input that the driver would refuse, a line for each."""
    pods = (platform or {}).get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {})
    executors = pods.get("executors", {})
    problems = []
    for graph_name, graph in [("root", spec["root"]), *spec["components"].items()]:
        for name, task in graph.get("dag", {}).get("tasks", {}).items():
            component = spec["components"][task["componentRef"]["name"]]
            where = f"{graph_name}, {name}"
            problems += [f"{where}: {line}" for line in _inputs(spec, graph, task, component)]
            problems += [f"{where}: {line}" for line in _pasted(graph, task)]
            pod = executors.get(component.get("executorLabel", ""), {})
            here = _declared(graph)
            problems += [f"{where}: the graph has no input {one}" for one in _named(pod) if one not in here]
    return problems


def _pasted(graph, task):
    """What the launcher cannot paste into a value that it is to be pasted into.

    It replaces text in the step's command line, whose JSON is written by then: a text or a number comes to
    stand there as text, of a mapping or a list the quotes end the text around it. The run's names the driver
    puts in, where one is all of a value (backend/src/v2/component/launcher_v2.go, 2.17.0).
    """
    inputs = task.get("inputs", {}).get("parameters", {})
    declared = _declared(graph)
    for name, source in inputs.items():
        value = source.get("runtimeValue", {}).get("constant")
        for placeholder in _PLACEHOLDER.findall(json.dumps(value)):
            if placeholder == value:
                continue
            if not (input_ := _INPUT.fullmatch(placeholder)):
                yield f"{name}: nobody replaces {placeholder} within a value"
            elif input_[1] not in inputs:
                yield f"{name}: the step has no input {input_[1]}"
            else:
                kind = declared[inputs[input_[1]]["componentInputParameter"]]["parameterType"]
                if KINDS[kind] in ("struct", "list"):
                    yield f"{name}: {input_[1]} is a {KINDS[kind]}, which cannot stand within a value"


def _declared(component):
    return component.get("inputDefinitions", {}).get("parameters", {})


def _inputs(spec, graph, task, component):
    declared = _declared(component)
    bound = task.get("inputs", {}).get("parameters", {})
    items = task.get("parameterIterator", {}).get("itemInput")
    for name, definition in declared.items():
        kind = definition["parameterType"]
        if name == items or kind == "TASK_CONFIG":
            continue  # The loop's own item, and what the driver itself fills in.
        if name not in bound:
            if "defaultValue" not in definition and not definition.get("isOptional"):
                yield f"neither value nor default for {name}"
            continue
        source = _kind(spec, graph, bound[name])
        if source is None:
            yield f"the graph has no input for {name}: {bound[name]}"
        elif not takes(kind, source):
            yield f"{name}: type mismatch: expect {kind}, got {source}"
    here = _declared(graph)
    for name, source in bound.items():
        outer = source.get("componentInputParameter")
        if name not in declared and outer and outer not in here:
            yield f"the graph has no input {outer}, for {name}"


def _kind(spec, graph, source):
    """Kind of the value that comes from a source; None where there is none."""
    if "componentInputParameter" in source:
        definition = _declared(graph).get(source["componentInputParameter"])
        return definition and KINDS[definition["parameterType"]]
    if "runtimeValue" in source:
        return _CONSTANTS[type(source["runtimeValue"]["constant"])]
    if "taskFinalStatus" in source:
        return "struct"
    output = source["taskOutputParameter"]
    producer = graph["dag"]["tasks"][output["producerTask"]]
    if "parameterIterator" in producer:
        return "list"
    outputs = spec["components"][producer["componentRef"]["name"]]["outputDefinitions"]["parameters"]
    return KINDS[outputs[output["outputParameterKey"]]["parameterType"]]


def _named(pod):
    """Inputs of the graph from which a pod's Secrets and claims have their names."""
    sources = [item["secretNameParameter"] for item in pod.get("secretAsEnv", [])]
    sources += [item["secretNameParameter"] for item in pod.get("secretAsVolume", [])]
    sources += [item["pvcNameParameter"] for item in pod.get("pvcMount", [])]
    return [source["componentInputParameter"] for source in sources if "componentInputParameter" in source]
