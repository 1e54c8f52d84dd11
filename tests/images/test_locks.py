"""The images' locks: the tested versions, with hashes, all that is needed, and no host of an index."""

import importlib.util
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from installed import extras_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
UNPINNED = {"setuptools"}
"""What pip leaves out of what it freezes."""


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("plan", ROOT / "images" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["trainer", "component"])
def image(request):
    return request.param


@pytest.fixture
def lock(planner, image):
    """The entries of an image's lock by name."""
    return planner.read_lock((ROOT / "images" / "locks" / f"{image}.txt").read_text())


def test_locked_versions_are_those_of_the_constraints(planner, lock):
    pins = planner.read_pins((ROOT / "constraints.txt").read_text())
    versions = {name: re.match(r"[\w.-]+==([\w.!+]+)", entry)[1] for name, entry in lock.items()}
    assert {name: pins.get(name) for name in versions.keys() - UNPINNED} == {
        name: version for name, version in versions.items() if name not in UNPINNED
    }


def test_each_file_has_a_hash_and_no_index_is_named(lock):
    for name, entry in lock.items():
        first, *hashes = entry.replace("\\\n", "\n").splitlines()
        assert hashes and all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64} *", line) for line in hashes), name
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.!+]+( ; [^@/]+)? *", first), name


def test_locks_contain_every_dependency(image, lock):
    """They are installed without their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"] | {"client": project["dependencies"]}
    pending = [Requirement(text) for extra in extras_of(image) for text in groups[extra]]
    seen = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name == project["name"]:
            texts = [text for extra in requirement.extras for text in groups[extra]]
            pending += [Requirement(text) for text in texts]
            continue
        assert name in lock, f"{name} is needed: write the locks anew (CONTRIBUTING.md)"
        try:
            version(name)
        except PackageNotFoundError:
            continue  # Of another platform.
        for text in requires(name) or []:
            inner = Requirement(text)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if inner.marker is None or any(inner.marker.evaluate(each) for each in environments):
                pending.append(inner)
    assert len(seen) > 80
    assert ("kfp" in lock) is (image == "component")
