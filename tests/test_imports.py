"""The house: who may import whom, and what must not be needed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "trainer": {"trainer"},
    "components": {"components", "trainer"},
    "pipelines": {"pipelines", "components", "trainer"},
}
MLMD_OR_MLFLOW = re.compile(r"\b(KFP_)?MLFLOW_|METADATA_(GRPC|STORE)|metadata-grpc|ml_metadata")
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imports(path):
    """Top-level packages that a file imports anywhere, function bodies included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path):
    package = path.relative_to(ROOT).parts[0]
    assert set(imports(path)) & set(MAY_IMPORT) <= MAY_IMPORT[package]


def test_nothing_needs_what_kubeflow_pipelines_drops_or_adds():
    """ML Metadata goes after 2.17, and MLflow's variables may be in the pods: neither is anything to us."""
    for path in FILES:
        assert not set(imports(path)) & {"ml_metadata", "mlflow"}, path
        texts = [
            node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
        ]
        assert not [text for text in texts if isinstance(text, str) and MLMD_OR_MLFLOW.search(text)], path


def test_no_file_is_longer_than_it_can_be_read():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in long.items() if lines > 350}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)


def test_trainer_runs_without_kfp_and_kubeflow_training():
    code = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kfp", "kubeflow", "kubernetes", "components", "pipelines"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
import trainer
for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from trainer.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    print("help", end.code)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "help 0" in done.stdout


@pytest.mark.parametrize("module", ["pipelines", "pipelines.cli", "pipelines.compile", "pipelines.graph"])
def test_pipelines_import_fast_and_without_torch(module):
    code = f"import time; start = time.monotonic(); import {module}, sys; "
    code += "print('torch' in sys.modules, time.monotonic() - start)"
    done = run(code)
    torch_there, seconds = done.stdout.split()
    assert torch_there == "False"
    # Two cores shared with other tests: the README's figure is 3 s on an idle machine.
    assert float(seconds) < 10
