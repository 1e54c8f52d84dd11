"""The last step of a build: an image that would not work is not made."""

import importlib.util
import sys
from pathlib import Path

import pytest

from trainer.model import fusion

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("check", ROOT / "images" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a module that notes its import, and a folder below it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "house/__init__.py": "seen = []",
        "house/room.py": "import house; house.seen.append('room')",
        "house/__main__.py": "raise SystemExit('must not run')",
        "house/cellar/__init__.py": "import house; house.seen.append('cellar')",
        "house/cellar/box.py": "import house; house.seen.append('box')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path / "house"
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


def test_root_is_refused(check, monkeypatch):
    monkeypatch.setattr(check.os, "getuid", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    with pytest.raises(SystemExit, match="the image's user is root"):
        check.main()


def test_every_module_is_imported(check, package):
    check._import_all("house", absent=[])
    assert sorted(sys.modules["house"].seen) == ["box", "cellar", "room"]


def test_a_part_that_the_image_does_not_have_is_left_out(check, package):
    check._import_all("house", absent=["house.cellar"])
    assert sys.modules["house"].seen == ["room"]


def test_a_module_that_cannot_be_imported_ends_the_build(check, package):
    (package / "room.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        check._import_all("house", absent=[])


def test_all_wrong_versions_are_named(check, monkeypatch):
    asked = [
        "numpy>=999",
        "no-such-package",
        "minio>=7",
        "kfp>=999; extra == 'pipeline'",
        "absent; extra == 'dev'",
    ]
    monkeypatch.setattr(check, "requires", lambda name: asked)
    with pytest.raises(SystemExit) as caught:
        check._check_versions(["pipeline"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("error: numpy ") and lines[0].endswith(" is installed, kubedet needs >=999")
    assert lines[1] == "error: no-such-package is not installed"
    assert lines[2].startswith("error: kfp ")


def test_what_is_installed_here_is_what_is_needed(check):
    check._check_versions(["pipeline", "export"])


def test_torch_and_torchvision_fit(check, capsys):
    check._check_torch()
    assert "torch " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(fusion.missing_tool("cpu") is not None, reason="no C++ compiler on this machine")
def test_a_compiler_is_tried(check, capsys):
    check._check_compiler()
    assert capsys.readouterr().out == "the compiler works\n"


def test_an_image_without_a_compiler_says_what_it_costs(check, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check._check_compiler()
    told = capsys.readouterr().out
    assert told.startswith("warning: there is no compiler (g++ or clang++)") and "uncompiled loss" in told
