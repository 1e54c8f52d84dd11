"""The objects under deploy/, alone and as kustomize builds them."""

import copy
import json
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
JOBS = DEPLOY / "examples" / "jobs"  # Specifications of jobs: no Kubernetes objects.
CLUSTER_SCOPED = ("SecurityContextConstraints", "MachineConfig")
FOLDERS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))


def read(path):
    return [item for item in yaml.safe_load_all(path.read_text()) if item is not None]


def files():
    return [
        path
        for path in sorted(DEPLOY.rglob("*.yaml"))
        if path.name != "kustomization.yaml" and JOBS not in path.parents
    ]


def pytest_generate_tests(metafunc):
    """Run a test for each object, or for each folder that kustomize builds."""
    if "manifest" in metafunc.fixturenames:
        objects = [(path, item) for path in files() for item in read(path)]
        ids = [f"{path.parent.name}-{item['kind']}-{item['metadata']['name']}" for path, item in objects]
        metafunc.parametrize("manifest", [item for _, item in objects], ids=ids)
    if "folder" in metafunc.fixturenames:
        metafunc.parametrize("folder", FOLDERS, ids=[str(path.relative_to(DEPLOY)) for path in FOLDERS])


@pytest.fixture(scope="session")
def deploy():
    return DEPLOY


@pytest.fixture(scope="session")
def the():
    """Find the one object of a kind and name below a folder of deploy/."""

    def find(kind, name, folder="."):
        inside = [item for path in files() if DEPLOY / folder in path.parents for item in read(path)]
        (manifest,) = [item for item in inside if (item["kind"], item["metadata"]["name"]) == (kind, name)]
        return manifest

    return find


@pytest.fixture(scope="session")
def build():
    return _build_here


def _build_here(folder):
    """Return the objects of a folder by the rules of kustomize that deploy/ uses; refuse all others."""
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "labels", "resources", "patches", "replacements"}
    assert set(rules) <= known, f"{folder}: teach this function {set(rules) - known}"
    objects = []
    for resource in rules["resources"]:
        path = (folder / resource).resolve()
        objects += _build_here(path) if path.is_dir() else copy.deepcopy(read(path))
    for item in rules.get("patches", []):
        for target in _selected(objects, item["target"]):
            for change in yaml.safe_load(item["patch"]):
                assert change["op"] == "replace"
                _set(target, change["path"].strip("/").split("/"), change["value"])
    if "namespace" in rules:
        _put_into(objects, rules["namespace"])
    for pairs in (item["pairs"] for item in rules.get("labels", [])):
        for item in objects:
            item["metadata"]["labels"] = item["metadata"].get("labels", {}) | pairs
    for item in rules.get("replacements", []):
        (source,) = _selected(objects, item["source"])
        value = source
        for key in item["source"]["fieldPath"].split("."):
            value = value[key]
        for target in item["targets"]:
            for selected in _selected(objects, target["select"]):
                for path in target["fieldPaths"]:
                    _set(selected, path.split("."), value)
    return objects


def _selected(objects, rule):
    selected = [
        item
        for item in objects
        if (item["kind"], item["metadata"]["name"]) == (rule["kind"], rule.get("name"))
    ]
    assert selected, f"nothing is selected by {json.dumps(rule)}"
    return selected


def _set(item, path, value):
    *way, last = [int(key) if key.isdigit() else key for key in path]
    for key in way:
        item = item[key]
    assert last in item or (isinstance(item, list) and last < len(item)), f"there is no {path} to replace"
    item[last] = value


def _put_into(objects, namespace):
    """Set the namespace of objects, and of accounts that are made here: kustomize's own rule."""
    accounts = {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"}
    for item in objects:
        if item["kind"] not in CLUSTER_SCOPED:
            item["metadata"]["namespace"] = namespace
        for subject in item.get("subjects", []):
            if subject["kind"] == "ServiceAccount" and subject["name"] in accounts:
                subject["namespace"] = namespace
