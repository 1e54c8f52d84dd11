"""The forms of the compiled pipeline that tests look at, and how to find a thing in them."""

import pytest

from pipelines import ASSIST, SEARCH, TITLES
from pipelines.forms import Form

FORMS = {
    "bucket": Form(), "volume": Form(volume=True), "shared": Form(partitions=2),
    "data": Form(until="shards"), "limited": Form(deadline=3600, ttl=60),
    "conditional": Form(conditional=True), "conditional_shared": Form(conditional=True, partitions=20),
    "search": Form(trials=3, parallelism=2), "search_gpus": Form(trials=2, gpus=4, volume=True),
}  # fmt: skip
PASTED = ("{{$.inputs.parameters['", "']}}")
MAIN = ("bucket", "volume", "shared")
STEPS = {
    "bucket": [*TITLES], "volume": [*TITLES], "shared": [*TITLES, *ASSIST],
    "data": ["prepare"], "limited": [*TITLES], "conditional": [*TITLES],
    "conditional_shared": [*TITLES, *ASSIST],
    "search": ["prepare", *SEARCH], "search_gpus": ["prepare", *SEARCH],
}  # fmt: skip


def of(*forms):
    """Let a test look at these forms in `compiled` and `spec`; without it at that for a bucket."""
    return pytest.mark.parametrize("compiled", forms, indirect=True)


def graphs(spec):
    return [spec["root"], *spec["components"].values()]


def tasks(spec):
    of_graphs = [graph["dag"]["tasks"] for graph in graphs(spec) if "dag" in graph]
    return {name: task for of_graph in of_graphs for name, task in of_graph.items()}


def asked_of_the_launcher(spec):
    """What the train step is told of its job in one argument: constants, and where parameters come from."""
    inputs = tasks(spec)["train"]["inputs"]["parameters"]
    return {
        name: inputs[value[len(PASTED[0]) : -len(PASTED[1])]] if value.startswith(PASTED[0]) else value
        for name, value in inputs["request"]["runtimeValue"]["constant"].items()
    }


def pods(compiled):
    return compiled[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
