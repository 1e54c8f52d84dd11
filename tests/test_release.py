"""One version everywhere, under one license."""

import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("deploy", "docs", "images", "tests/cluster", "tests/components/launchers/golden")
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""sha256 of the license's text as the Apache Software Foundation publishes it."""


def test_every_named_image_has_this_version():
    paths = [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    tags = {
        (str(path.relative_to(ROOT)), tag)
        for path in paths
        if path.is_file() and path.suffix not in (".png", ".jpg", ".pyc")
        for tag in re.findall(r"kubedet[-/](?:trainer|component):(\d[\w.]*)", path.read_text())
    }
    assert len(tags) > 15
    assert {tag for _, tag in tags} == {PROJECT["version"]}, sorted(tags)


def test_the_changelog_begins_with_this_version():
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} \((not released|\d{{4}}-\d\d-\d\d)\)", heads[0])


def test_the_license_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_security_reports_are_explained():
    text = (ROOT / "SECURITY.md").read_text()
    assert "## Report" in text and "not in a public issue" in text
    assert re.search(rf"\| {PROJECT['version'].rpartition('.')[0]} \| yes \|", text)
