"""The steps: thin bodies, one image, nothing secret; and how a step says what went wrong."""

import ast
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from components import cleanup, convert_to_shards, download, evaluate, export, steps, train
from components.images import COMPONENT_IMAGE
from operations.tuning import best, trial
from trainer.base.errors import DataError, StorageError

COMPONENTS = [
    module.__dict__[module.__name__.split(".")[-1]]
    for module in (download, convert_to_shards, train, evaluate, export, trial, best, cleanup)
]


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda component: component.name)
def test_bodies_are_thin_and_import_inside(component):
    tree = ast.parse(Path(component.python_func.__code__.co_filename).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    body = function.body[1:]
    assert ast.get_docstring(function)
    assert body[-1].end_lineno - body[0].lineno + 1 <= 26
    assert {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names} == {
        "dsl",
        "COMPONENT_IMAGE",
    }


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda component: component.name)
def test_all_run_in_our_image_and_install_nothing(component):
    container = component.component_spec.implementation.container
    assert container.image == COMPONENT_IMAGE and ":" in container.image
    assert "pip install" not in " ".join(map(str, container.command))


def failing(error):
    """Return work that fails with an error."""

    def work():
        raise error

    return work


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in ("KUBERNETES_SERVICE_HOST", steps.TRIES_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_known_error_is_a_message_and_an_exit_code(capfd):
    with pytest.raises(SystemExit) as caught:
        steps.run_step("shard", failing(DataError("the source is empty", fix="fill it")))
    assert caught.value.code == 2
    shown = capfd.readouterr().err
    assert "error: the source is empty\n  fix: fill it" in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("error", "place", "fix"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x.tar"), "/data/x.tar", "disk is full"),
        (OSError(errno.ENOSPC, "No space left on device"), "", "disk is full"),
        (OSError(errno.EMFILE, "Too many open files"), "", "ulimit -n"),
    ],
)
def test_what_ran_out_is_said_with_its_place(error, place, fix, capfd):
    with pytest.raises(SystemExit) as caught:
        steps.run_step("shard", failing(error))
    assert caught.value.code == 2
    shown = capfd.readouterr().err
    assert place in shown and fix in shown and "Traceback" not in shown


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        steps.run_step("shard", lambda: 1 / 0)


def test_in_a_pod_kubernetes_learns_what_the_step_said(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MINIO_ENDPOINT", "mine:9000")
    monkeypatch.setattr(steps, "TERMINATION_LOG", tmp_path / "termination-log")
    with pytest.raises(SystemExit) as caught:
        steps.run_step("evaluate", failing(DataError("grün " * 2000, fix="repair it")))
    assert caught.value.code == 2
    written = (tmp_path / "termination-log").read_bytes()
    assert written.startswith("grün grün".encode()) and len(written) <= 4096
    # The message is the end of the log, for whoever looks there.
    assert capfd.readouterr().err.rstrip().endswith("fix: repair it")


def test_keys_that_are_missing_are_told_with_the_secrets_name(capfd, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    error = StorageError("cannot read s3://bucket/x: the name 's3.amazonaws.com' is not known")
    with pytest.raises(SystemExit):
        steps.run_step("download", failing(error), secret="team-keys")
    assert "its namespace has no Secret team-keys" in capfd.readouterr().err


def test_the_process_that_waits_imports_neither_torch_nor_a_store():
    names = "{'torch', 'minio', 'numpy'}"
    code = f"import sys; from components import reports, steps; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
