"""The documentation as a site: built strictly, complete, and without any other host."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|link)[^>]*(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(settings):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", settings]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture(scope="module")
def site(pages, tmp_path_factory):
    """Folder of the site, built as `make docs` does."""
    settings = pages.write(tmp_path_factory.mktemp("docs"))
    done = build(settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return settings.parent / "site"


def test_every_document_is_in_it(site):
    others = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in others)]
    places = [path.relative_to(ROOT).with_suffix(".html") for path in documents]
    places += [Path("index.html"), Path("deploy/index.html"), Path("deploy/examples/jobs/index.html")]
    assert [str(place) for place in places if not (site / place).exists()] == []
    front = (site / "index.html").read_text()
    assert [
        str(place) for place in places if f'href="{place}"' not in front and place.name != "index.html"
    ] == []


def test_every_module_has_a_page_of_its_docstrings(site):
    for package in ("kubedet", "trainer", "components", "operations", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stem != "__main__":
                place = path.relative_to(ROOT).with_suffix(".html")
                place = place.with_name("index.html") if path.stem == "__init__" else place
                assert (site / "api" / place).exists(), place
    text = (site / "api/trainer/storage/web.html").read_text()
    assert "trainer.storage.web" in text
    config = (site / "api/trainer/config/schema.html").read_text()
    assert "Share of the training images held out for validation" in config
    assert "Raises:" in re.sub("<[^>]+>", "", (site / "api/trainer/data/verification.html").read_text())


def test_no_page_loads_anything_from_another_host(site):
    loads = {
        (str(path.relative_to(site)), address)
        for path in site.rglob("*.html")
        for address in LOADED.findall(path.read_text())
    }
    assert loads == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//", styles)
