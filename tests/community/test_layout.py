"""The components as Kubeflow's pipelines-components repository takes them, by what its own checks ask.

Its rules, as they stood on 2026-07-23 (commit fab64a9, docs/CONTRIBUTING.md and scripts/): folders and files,
the order and types of metadata.yaml, OWNERS, imports, base images, ruff's settings, the form of README.md.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from installed import extras_of

from community.__main__ import ENTRIES, file_of, write
from pipelines import ASSIST, CLEANUP, SEARCH, TITLES

ROOT = Path(__file__).parents[2]
CATEGORIES = {"data_processing", "deployment", "evaluation", "training"}
FILES = {"__init__.py", "component.py", "metadata.yaml", "OWNERS", "README.md"}
OWNERS = {"approvers": ["alice", "bob"], "reviewers": ["carol"]}
VERSION = re.compile(r"(>=|<=|==)?\d+\.\d+\.\d+")
ALONE = """
import importlib.util, sys
from kfp import compiler

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("components", "operations", "pipelines", "trainer", "community"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuse())
for path in sys.argv[2:]:
    name = path.split("/")[-2]
    spec = importlib.util.spec_from_file_location("one_" + name, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compiler.Compiler().compile(getattr(module, name), f"{sys.argv[1]}/{name}.yaml")
"""


def module_of(name):
    return ".".join(file_of(name).relative_to(ROOT).with_suffix("").parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    clone = tmp_path_factory.mktemp("clone")
    (clone / "components/training/other").mkdir(parents=True)
    (clone / "components/training/other/component.py").write_text("theirs")
    stale = clone / "components/training/kubedet/gone"
    stale.mkdir(parents=True)
    folders = write(clone, OWNERS, {"documentation": "https://docs.example"})
    assert (clone / "components/training/other/component.py").read_text() == "theirs"
    assert not stale.exists()
    return {folder.name: folder for folder in folders}


@pytest.fixture(scope="module")
def compiled(folders, tmp_path_factory):
    """The compiled components, each loaded where none of our packages is."""
    folder = tmp_path_factory.mktemp("compiled")
    paths = [str(folder / "component.py") for folder in folders.values()]
    # No bytecode: the folders are looked at as they were made.
    command = [sys.executable, "-B", "-W", "ignore", "-c", ALONE, str(folder), *paths]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: yaml.safe_load((folder / f"{name}.yaml").read_text().split("\n---")[0]) for name in folders}


def test_every_step_of_the_pipeline_is_there(folders):
    assert set(folders) == set(ENTRIES) == {*TITLES, *ASSIST, *SEARCH, *CLEANUP}


def test_folders_and_files_are_those_that_are_asked_for(folders):
    for name, folder in folders.items():
        category, group = folder.parts[-3:-1]
        assert (folder.parts[-4], category in CATEGORIES, group) == ("components", True, "kubedet")
        further = {"Containerfile", "constraints.txt"} if name == "train" else set()
        assert {path.name for path in folder.iterdir()} - further == FILES
        assert {"__init__.py", "OWNERS", "README.md"} <= {path.name for path in folder.parent.iterdir()}
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)


def metadata_of(folder):
    return yaml.safe_load((folder / "metadata.yaml").read_text())


def test_metadata_has_the_fields_in_their_order_and_of_their_types(folders):
    for name, folder in folders.items():
        metadata = metadata_of(folder)
        assert list(metadata) == ["name", "stability", "dependencies", "tags", "lastVerified", "links"]
        assert metadata["name"] == f"kubedet_{name}"
        assert metadata["stability"] in ("experimental", "alpha", "beta", "stable")
        assert all(isinstance(tag, str) for tag in metadata["tags"])
        assert metadata["tags"][0] == folder.parts[-3]
        assert metadata["links"] == {"documentation": "https://docs.example"}
    names = [metadata_of(folder)["name"] for folder in folders.values()]
    assert len(set(names)) == len(names)


def test_a_module_imports_python_and_kfp_alone_and_names_its_image_as_text(folders):
    for folder in folders.values():
        for node in ast.parse((folder / "component.py").read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"kfp"}
            if isinstance(node, ast.FunctionDef):
                (base,) = [word.value for word in node.decorator_list[0].keywords if word.arg == "base_image"]
                assert isinstance(base, ast.Constant)
                assert re.fullmatch(r"ghcr\.io/kubeflow/pipelines-components-[a-z-]+:main", base.value)


def test_each_compiles_where_nothing_of_ours_is_to_what_the_pipeline_runs(folders, compiled):
    for name in folders:
        spec = compiled[name]
        (executor,) = spec["deploymentSpec"]["executors"].values()
        assert executor["container"]["image"] == "ghcr.io/kubeflow/pipelines-components-kubedet:main"
        component = getattr(importlib.import_module(module_of(name)), name)
        (written,) = spec["components"].values()
        declared = written.get("inputDefinitions", {})
        inputs = {**declared.get("parameters", {}), **declared.get("artifacts", {})}
        # A task's configuration and final status are handed in by Kubeflow.
        by_kubeflow = {"task_config", "status"}
        assert set(inputs) - by_kubeflow == set(component.component_spec.inputs) - by_kubeflow
        results = written.get("outputDefinitions", {})
        outputs = {**results.get("parameters", {}), **results.get("artifacts", {})}
        assert set(outputs) == set(component.component_spec.outputs or {})


def test_a_body_is_the_pipelines_own(folders):
    for name, folder in folders.items():
        bodies = []
        for path in (folder / "component.py", file_of(name)):
            (function,) = (
                node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
            )
            bodies.append([ast.dump(node) for node in function.body[1:]])
        assert bodies[0] == bodies[1] != []


def test_its_ruff_is_content(folders):
    (root,) = {folder.parents[3] for folder in folders.values()}
    ruff = [sys.executable, "-m", "ruff"]
    select = ["--select", "E,W,F,I,D", "--ignore", "D100,D104,D415"]
    google = ["--config", "lint.pydocstyle.convention='google'", "--config", "line-length=120"]
    paths = [str(folder) for folder in folders.values()]
    for words in (["check", *select, *google], ["format", "--check", "--config", "line-length=120"]):
        done = subprocess.run(
            [*ruff, *words, "--isolated", "--no-cache", *paths],
            cwd=root, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_has_what_our_own_image_of_the_steps_has(folders):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (folders["train"] / "Containerfile").read_text()
    extras, version = re.search(r'"kubedet\[(.+)\]==(.+)"', text).groups()
    assert version == project["version"]
    assert ["client", *extras.split(",")] == extras_of("component")
    assert (folders["train"] / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
