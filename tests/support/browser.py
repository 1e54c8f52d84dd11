"""A real browser without a window, driven over Chrome's DevTools protocol through two pipes.

https://chromedevtools.github.io/devtools-protocol: messages are JSON, each ended by a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """Return the path of a browser on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def page(url: str, folder: Path, *, width: int = 1200, dark: bool = False) -> Iterator["Page"]:
    """Open a page; the browser's own files go to a folder, and it ends with the block."""
    # The browser reads descriptor 3 and writes 4; what becomes them must lie above both.
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
    command = [
        program() or NAMES[0], "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, ends), *command], pass_fds=ends,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    for descriptor in (to_browser[0], from_browser[1], *ends):
        os.close(descriptor)
    try:
        yield Page(to_browser[1], from_browser[0], url, width, dark)
    finally:
        with suppress(ProcessLookupError):  # Its helpers too: they would write to the folder.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])


class Page:
    """An open page."""

    def __init__(self, write: int, read: int, url: str, width: int, dark: bool) -> None:
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Errors and warnings of the page's console, and requests that failed."""
        self.requests: list[str] = []
        """Addresses that the page asked for; what it holds itself (data:) is left out."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        self._call("Page.navigate", url=url)
        end = time.monotonic() + _SECONDS
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < end, f"{url} does not load"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse on the first element that a CSS selector names."""
        where = self.run(
            "(e => {e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1
            )

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith("data:"):
            self.requests.append(parameters["request"]["url"])
