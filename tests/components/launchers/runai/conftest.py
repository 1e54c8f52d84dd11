"""Run:ai for tests: a small program of its name on the PATH."""

import pytest
from fake_runai import FakeRunai

from components.launchers.runai.backend import RunaiBackend, Timings
from components.launchers.runai.cli import Cli
from components.launchers.spec import from_fields


@pytest.fixture
def runai(tmp_path, monkeypatch):
    """The program, alone on the PATH but for the system's."""
    folder = tmp_path / "runai"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return FakeRunai(folder)


@pytest.fixture
def backend(runai):
    """A backend in haste, in project team."""
    return RunaiBackend(Cli("team"), Timings(poll=0.05, removal=2, submit=20))


@pytest.fixture
def job():
    """Makes a job."""
    return lambda **fields: from_fields(
        {"command": ["sh", "-c", "echo 'a b'; $(x)"], "name": "train", "image": "image:1"} | fields
    )
