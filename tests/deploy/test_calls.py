"""The launcher's Role against the launcher's code: each call is granted, and each verb is that of a call."""

import ast
import importlib
from pathlib import Path

import pytest

from components.launchers import cluster
from components.launchers.cluster.kinds import KINDS
from components.launchers.spec import JobSpec

STREAMS = {
    ("watch", "workflows"): ("termination.py", "/apis/{group}/{version}/namespaces/"),
    ("watch", "pods"): ("pods.py", "/api/v1/namespaces/{namespace}/pods"),
    ("get", "pods/log"): ("logs.py", "/api/v1/namespaces/{namespace}/pods/{name}/log"),
}
"""What is read as it comes, past Cluster.call: where, and the address."""
OUTSIDE = {("get", "deployments"), ("get", "configmaps")}
"""What `cluster/kueue.py` reads of Kueue itself, if the user may: no namespace's Role grants it."""
FOLDER = Path(cluster.__file__).parent
JOBS = [
    JobSpec(name="a", image="i", command=("true",)),
    JobSpec(name="b", image="i", command=("true",), backoff=3, priority_class="high"),
]
"""One that needs nothing else in the namespace, and one that brings what it needs."""


class Module:
    """A file of the launcher: its calls, and the words that they are made with."""

    def __init__(self, path):
        place = path.relative_to(FOLDER).with_suffix("").parts
        self.values = vars(importlib.import_module(".".join([cluster.__name__, *place])))
        self.tree = ast.parse(path.read_text())
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]

    def cluster_calls(self):
        """Yield the verb and the resource of every Cluster.call."""
        for function in self.functions:
            for call in _calls(function, "cluster.call"):
                verb, resource = call.args[:2]
                for word in self.words(verb, function):
                    yield from ((word, what) for what in self.words(resource, function))

    def words(self, node, function):
        """What an expression may be: a text, something of each kind of jobs, or what the callers give."""
        if isinstance(node, ast.Constant):
            return {node.value}
        if ast.unparse(node) == "kind.plural":
            return {kind.plural for kind in KINDS.values()}
        if ast.unparse(node) in self.values:
            return {self.values[ast.unparse(node)]}
        parameters = [item.arg for item in function.args.args]
        if ast.unparse(node) not in parameters:
            return _brought()  # Of _send: made of what is sent.
        index = parameters.index(ast.unparse(node))
        callers = [(call, other) for other in self.functions for call in _calls(other, function.name)]
        words = [self.words(call.args[index], other) for call, other in callers if len(call.args) > index]
        return set().union(*words) if callers else _looked_for()


def _calls(function, name):
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
            yield node


def _looked_for():
    resources = set()
    for kind in KINDS.values():
        for job in JOBS:
            kind.manifests(job, lambda plural, name: resources.add(plural))
    return resources


def _brought():
    every = [kind.manifests(job, lambda *_: True)[:-1] for kind in KINDS.values() for job in JOBS]
    return {f"{body['kind'].lower()}s" for bodies in every for body in bodies}


def granted(role):
    """What a Role grants, as verb and resource."""
    rules = role["rules"]
    return {(verb, what) for rule in rules for what in rule["resources"] for verb in rule["verbs"]}


@pytest.fixture(scope="module")
def calls_of_launcher():
    """What the launcher asks of the API server."""
    calls = {pair for path in sorted(FOLDER.rglob("*.py")) for pair in Module(path).cluster_calls()}
    assert calls >= OUTSIDE
    return (calls - OUTSIDE) | set(STREAMS)


def test_the_calls_are_found(calls_of_launcher):
    assert calls_of_launcher >= {("create", kind.plural) for kind in KINDS.values()}
    assert calls_of_launcher >= {
        ("patch", "trainingruntimes"),
        ("get", "trainingruntimes"),
        ("list", "events"),
    }
    assert ("patch", "trainjobs") not in calls_of_launcher


@pytest.mark.parametrize("stream", STREAMS.values(), ids=[name for _, name in STREAMS])
def test_what_is_read_as_it_comes_is_read_there(stream):
    file, address = stream
    assert address in (FOLDER / file).read_text()


def test_all_that_the_launcher_asks_for_is_granted_and_nothing_else(the, calls_of_launcher):
    assert granted(the("Role", "kubedet-launcher")) == calls_of_launcher


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_both_kinds_of_jobs_are_granted_alike(the, kind):
    rules = the("Role", "kubedet-launcher")["rules"]
    (rule,) = [rule for rule in rules if kind.plural in rule["resources"]]
    assert rule["apiGroups"] == [kind.group]
    assert set(rule["verbs"]) == {"create", "get", "list", "delete"}
