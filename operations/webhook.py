"""Posts JSON to a webhook without leaking its secret URL in errors."""

import os
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import urllib3

from trainer.storage import environment

_PASSING = (429, 500, 502, 503, 504)
"""HTTP codes after which another try may succeed."""


def setting(name: str) -> str:
    """Return an environment variable without surrounding space, which a Secret's file may have."""
    return os.environ.get(name, "").strip()


def post(
    url: str, body: bytes, variable: str, *, timeout: urllib3.Timeout, waits: Sequence[float],
    headers: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Post JSON; return the problem, without the address, or nothing.

    `variable` names the address in the result; `waits` are seconds before the second try, the third, and so
    on.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        return f"{variable} is no address that begins with https://"
    client = environment.web_client(url)
    problem = ""
    for wait in (0.0, *waits):
        time.sleep(wait)
        try:
            # A redirect would send it to another server than the configured one.
            response = client.request(
                "POST", url, body=body, headers={"Content-Type": "application/json", **(headers or {})},
                timeout=timeout, redirect=False, retries=False,
            )  # fmt: skip
        except urllib3.exceptions.ReadTimeoutError:
            return "it did not answer"  # Another try might post it twice.
        except urllib3.exceptions.HTTPError as error:
            problem = type(error).__name__
            continue
        if response.status < 300:
            return ""
        problem = f"it answered with HTTP code {response.status}"
        if response.status not in _PASSING:
            break
    return problem
