"""The last step of a build: an image that would not work is not made."""

import ast
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import pytest
from installed import extras_of, needed
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("check", ROOT / "images" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def closure(extras):
    """Top-level modules of all that an installation with these extras brings, by what is installed here."""
    names = needed(extras)
    return {
        module
        for module, packages in metadata.packages_distributions().items()
        if names & {canonicalize_name(package) for package in packages}
    }


def imported(path):
    """Top-level modules that a file needs to be imported: what its functions import does not count."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize("image", ["trainer", "component"])
def test_an_image_has_what_its_modules_import(check, image):
    extras = extras_of(image)
    provided = (
        closure(extras) | set(sys.stdlib_module_names) | {"trainer", "components", "operations", "pipelines"}
    )
    modules = check.modules_for(extras)
    assert len(modules) > 80
    missing = {}
    for name in modules:
        path = Path(importlib.util.find_spec(name).origin)
        if absent := set(imported(path)) - provided:
            missing[name] = absent
    assert not missing


def test_what_the_images_leave_out_is_little(check):
    every = set(check.modules_for([*check._EXTRA.values()]))
    assert every == set(check.modules_for(extras_of("component")))
    assert {name.split(".")[0] for name in check.modules_for([])} == {"trainer"}


def test_all_wrong_versions_are_named(check, monkeypatch):
    imports = ["kfp>=999", "no-such-package", "numpy>=999; extra == 'pod'", "absent; extra == 'dev'"]
    monkeypatch.setattr(check, "requires", lambda name: imports)
    expected = {"client": ["kfp ", "no-such-package is not installed"], "pod": ["numpy "]}
    for extras in (["client"], ["pod"], ["client", "pod"]):
        with pytest.raises(SystemExit) as caught:
            check._check_versions(extras)
        starts = [f"error: {start}" for extra in extras for start in expected[extra]]
        assert all(map(str.startswith, str(caught.value).splitlines(), starts))
        assert len(str(caught.value).splitlines()) == len(starts)
