"""Chromium without a window, for tests of pages: this machine's own, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)

needed = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")


class Heard:
    """What a page complains of and asks for, from now on."""

    def __init__(self, page: Any) -> None:
        self.complaints: list[str] = []
        """Errors and warnings of the page's console, and exceptions."""
        self.requests: list[str] = []
        """Addresses that the page asked for; what it holds itself (data:) is left out."""
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._line)
        page.on("request", self._request)

    def _line(self, line: Any) -> None:
        if line.type in ("error", "warning", "assert"):
            self.complaints.append(line.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """Start the browser; it ends with the block."""
    from playwright import sync_api  # Where only the tests for a GPU run it is not installed.

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox", *arguments])
        yield browser
        browser.close()


@contextmanager
def page(url: str, *, width: int = 1200, dark: bool = False) -> Iterator[tuple[Any, Heard]]:
    """Open a page in a browser of its own, a telephone's where it is narrow."""
    with chromium() as browser:
        shown = browser.new_page(
            viewport={"width": width, "height": 900},
            is_mobile=width < 600,
            color_scheme="dark" if dark else "light",
        )
        heard = Heard(shown)
        shown.goto(url)
        yield shown, heard
