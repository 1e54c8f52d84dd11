"""The script that gives an image a compiler, on paths where only some programs are."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "images" / "compiler.sh"


@pytest.fixture
def path(tmp_path):
    """A folder that is the whole path of the script; programs in it note how they were called."""

    def add(name, body='echo "$0 $*" >> "${0%/*}/calls"'):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def python(include):
        add("python3", f'echo "{include}"')

    add.folder, add.python = tmp_path, python
    return add


def run(folder):
    return subprocess.run(
        [shutil.which("sh"), str(SCRIPT)],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def headers(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    return tmp_path / "include"


def test_a_complete_base_is_unchanged(path, headers):
    path("g++")
    path("apt-get")
    path.python(headers)
    assert run(path.folder).returncode == 0
    assert not (path.folder / "calls").exists()


@pytest.mark.parametrize(
    ("compiler", "include", "packages"),
    [(False, True, "g++"), (True, False, "python3-dev"), (False, False, "g++ python3-dev")],
)
def test_missing_packages_are_installed(compiler, include, packages, path, headers):
    if compiler:
        path("g++")
    path("apt-get")
    path("rm", "exit 0")
    path.python(headers if include else "/nowhere")
    assert run(path.folder).returncode == 0
    calls = [line.partition(" ")[2] for line in (path.folder / "calls").read_text().splitlines()]
    assert calls == ["update", f"install -y --no-install-recommends {packages}"]


def test_a_base_without_a_package_manager_gets_a_remedy(path, headers):
    path.python(headers)
    ran = run(path.folder)
    assert ran.returncode == 1 and "COMPILER=" in ran.stderr and "g++" in ran.stderr


def test_the_headers_of_a_real_python_are_found(path):
    """The path that the script asks a real interpreter for."""
    path("g++")
    path("python3", f'exec {sys.executable} "$@"')
    ran = run(path.folder)
    expected = Path(sysconfig.get_path("include"), "Python.h").exists()
    assert (ran.returncode == 0) == expected
