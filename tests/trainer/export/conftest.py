"""Fixtures of the tests of the export."""

import browser
import pytest
from bundles import make_bundle
from served_model import served


@pytest.fixture
def bundle_uri(tmp_path):
    """URI of a complete bundle."""
    return make_bundle(tmp_path / "made")


@pytest.fixture
def address(bundle_uri):
    """Host and port of a running server of the small model."""
    with served(bundle_uri) as (port, _):
        yield "127.0.0.1", port


@pytest.fixture(scope="module")
def chromium():
    """A browser."""
    with browser.chromium() as opened:
        yield opened


@pytest.fixture
def visit(chromium, address):
    """Opens the server's page; console errors and requests to other servers fail the test."""
    contexts, heard = [], []

    def go(allowed="", **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        heard.append(browser.Heard(page))
        page.goto("http://{}:{}/".format(*address))
        page.get_by_role("heading", name="Try pets").wait_for()
        go.allowed, go.requests = allowed, heard[-1].requests
        return page

    yield go
    for context in contexts:
        context.close()
    complaints = [line for each in heard for line in each.complaints]
    assert [line for line in complaints if not go.allowed or go.allowed not in line] == []
    own = ("http://{}:{}/".format(*address), "blob:")
    assert [url for each in heard for url in each.requests if not url.startswith(own)] == []
