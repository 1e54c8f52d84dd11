"""What pip is asked for in an image, whatever its base brings."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from installed import extras_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = {
    "name": "kubedet",
    "dependencies": ["kfp", "minio"],
    "optional-dependencies": {
        "train": ["kubedet[pod,export]", "kfp"],
        "pod": ["torch>=2", "minio"],
        "export": ["onnx"],
    },
}
LOCK = {
    "torch": "torch==2.15.0 --hash=sha256:aa\n", "torchvision": "torchvision==0.29 --hash=sha256:bb\n",
    "minio": "minio==7.2 --hash=sha256:cc\n", "setuptools": "setuptools==84 --hash=sha256:dd\n",
}  # fmt: skip
PINS = {"torch": "2.15.0", "torchvision": "0.29", "nvidia-nccl-cu13": "2.30", "minio": "7.2", "kfp": "2.17.0"}


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("plan", ROOT / "images" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_empty_base_gets_the_tested_set(planner):
    files = planner.plan(PROJECT, PINS, LOCK, {"pip": "26.3"}, ["pod"])
    assert files["torch.txt"] == LOCK["torch"] + LOCK["torchvision"]
    assert (
        files["packages.txt"] == LOCK["minio"] + LOCK["setuptools"]
        and files["build.txt"] == LOCK["setuptools"]
    )
    assert "torch==2.15.0\n" in files["constraints.txt"]
    assert files["requirements.txt"] == "--no-index\ntorch>=2\nminio\n"


def test_a_base_with_torch_keeps_its_versions(planner):
    brought = {"torch": "2.14.0a0+nv", "nvidia-nccl-cu13": "2.29", "minio": "6.0"}
    files = planner.plan(PROJECT, PINS, LOCK, brought, ["pod"])
    assert files["torch.txt"] == "" and files["packages.txt"] == LOCK["minio"] + LOCK["setuptools"]
    assert "--no-index" not in files["requirements.txt"]
    # torchvision is left to pip, which looks for one that fits this torch.
    assert files["constraints.txt"] == "kfp==2.17.0\nminio==7.2\nnvidia-nccl-cu13==2.29\ntorch==2.14.0a0+nv\n"


def test_a_base_with_all_of_torch_needs_no_index(planner):
    files = planner.plan(PROJECT, PINS, LOCK, {"torch": "2.15.0", "torchvision": "0.29"}, ["pod"])
    assert files["requirements.txt"].startswith("--no-index\n") and files["torch.txt"] == ""


@pytest.mark.parametrize(
    ("extras", "needed"),
    [
        (["client"], "kfp minio"), (["client", "pod"], "kfp minio torch>=2"),
        (["train"], "torch>=2 minio onnx kfp"), (["train", "export"], "torch>=2 minio onnx kfp"),
    ],
)  # fmt: skip
def test_extras_that_include_others_are_expanded(planner, extras, needed):
    lines = planner.plan(PROJECT, PINS, LOCK, {}, extras)["requirements.txt"].splitlines()
    assert lines == ["--no-index", *needed.split()]


@pytest.fixture
def written(tmp_path):
    """The files for an empty base, from this project."""
    command = [sys.executable, "-I", "-S", ROOT / "images" / "plan.py", "--project", ROOT]
    command += ["--lock", ROOT / "images" / "locks" / "component.txt"]
    subprocess.run(
        [*command, "--output", tmp_path / "plan", "--extras", "client,pod,export"], check=True, timeout=60
    )
    return tmp_path / "plan"


def test_torch_is_installed_with_all_it_needs(planner, written):
    """It is installed without its dependencies: the rest must not bring another of its packages."""
    pins = planner.read_lock((written / "torch.txt").read_text())
    needed = {re.split(r"[^\w.-]", text)[0].lower() for text in requires("torch") if "extra ==" not in text}
    ours = {name for name in needed if re.match("nvidia-|cuda-|triton", name)}
    assert ours
    assert {name.replace("_", "-") for name in ours} | {"torch", "torchvision"} <= set(pins)


def test_an_old_python_gets_a_remedy(planner, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10))
    with pytest.raises(SystemExit, match=r"error: BASE has Python 3\.\d+.*choose one with 3\.11 or newer"):
        planner.main()


UNPINNED = {"setuptools"}
"""What pip leaves out of what it freezes."""


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
        assert name in lock, f"{name} is needed: write the locks again (CONTRIBUTING.md)"
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
