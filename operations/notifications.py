"""Notifications to a webhook when runs end. Its secret URL is never in a log, error, job or artifact."""

import json
import logging
import os
import time
from dataclasses import asdict
from urllib.parse import urlsplit

import urllib3

from components.hooks import EVENTS, FAILED, HELD_BACK, NOTHING_NEW, PASSED, STOPPED, Outcome
from trainer import storage
from trainer.base.errors import KubedetError
from trainer.storage import environment

logger = logging.getLogger(__name__)

WEBHOOK_NAME = "kubedet-notify"  # Default name of the Secret. Without the Secret, nothing is sent.

URL_VARIABLE, KIND_VARIABLE, ON_VARIABLE = "KUBEDET_NOTIFY_URL", "KUBEDET_NOTIFY_KIND", "KUBEDET_NOTIFY_ON"

SECRET_KEYS = {"url": URL_VARIABLE, "kind": KIND_VARIABLE, "on": ON_VARIABLE}
"""Environment variables by the keys of the Secret; `url` is required."""

SLACK, JSON = KINDS = ("slack", "json")
"""Formats of a notification: {"text": ...} as Slack reads it, or all fields as JSON."""

_HEADLINES = {
    FAILED: "failed",
    STOPPED: "was stopped",
    PASSED: "passed the gate, and its model is published",
    HELD_BACK: "was held back by the gate: no model is published",
    NOTHING_NEW: "had nothing new to train on",
}
_SHOWN_METRICS = ("coco/AP", "coco/AP50")
_MAX_REASON_LENGTH = 3000  # Maximum length of a reason in the text.
_TIMEOUT = urllib3.Timeout(connect=5, read=10)
_RETRY_WAITS = (1.0, 3.0)  # Seconds before the second and third attempts.
_RETRY_STATUSES = (429, 500, 502, 503, 504)  # HTTP status codes to retry.


def _read_variable(name: str) -> str:
    """Return an environment variable without surrounding whitespace, which a Secret may contain."""
    return os.environ.get(name, "").strip()


def _post(url: str, body: bytes, variable: str) -> str:
    """Post JSON; return an error (with `variable` in place of the URL), or an empty string."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        return f"{variable} is not an address that begins with https://"
    client = environment.web_client(url)
    problem = ""
    for wait in (0.0, *_RETRY_WAITS):
        time.sleep(wait)
        try:
            # A redirect would send it to a server that was not configured.
            response = client.request(
                "POST",
                url,
                body=body,
                headers={"Content-Type": "application/json"},
                timeout=_TIMEOUT,
                redirect=False,
                retries=False,
            )
        except urllib3.exceptions.ReadTimeoutError:
            return "the webhook did not answer"  # Another try might post it twice.
        except urllib3.exceptions.HTTPError as error:
            problem = type(error).__name__
            continue
        if response.status < 300:
            return ""
        problem = f"the webhook answered with HTTP code {response.status}"
        if response.status not in _RETRY_STATUSES:
            break
    return problem


def notify(outcome: Outcome, folder: str = "") -> bool:
    """Post a notification if the webhook wants it, once per `folder` (URI); return whether it was sent."""
    headline = _HEADLINES[outcome.event]
    try:
        words = _read_variable(ON_VARIABLE).lower().replace("-", " ").split(",")
        chosen = {word.strip() for word in words} - {""}
        if unknown := sorted(chosen - set(EVENTS)):
            logger.warning("%s: no event %s; use %s", ON_VARIABLE, ", ".join(unknown), ", ".join(EVENTS))
        if not _read_variable(URL_VARIABLE) or (chosen and outcome.event not in chosen):
            return False
        marker = storage.join(folder, "notices", f"{outcome.event.replace(' ', '-')}.json")
        try:
            content = json.dumps({"event": outcome.event}).encode()
            if folder and not storage.create(marker, content):
                return False
        except KubedetError as error:
            logger.warning("%s: a notice may be sent twice", error.message)
        name, body = f"{URL_VARIABLE} (`url` of the Secret)", json.dumps(_make_body(outcome)).encode()
        problem = _post(_read_variable(URL_VARIABLE), body, name)
    except Exception as error:  # Its text may contain the URL.
        problem = type(error).__name__
    if problem:
        logger.warning("cannot send the notification that the run %s: %s", headline, problem)
    else:
        logger.info("sent a notification that the run %s", headline)
    return not problem


def _make_body(outcome: Outcome) -> dict[str, object]:
    """Return the body of a notification; its kind is set in the environment or derived from the URL."""
    lines = [f"kubedet: run {outcome.run} {_HEADLINES[outcome.event]}"]
    if outcome.model:
        lines.append(f"model {outcome.model} {outcome.model_version}".rstrip())
    metrics = outcome.metrics
    if shown := [f"{name} {metrics[name]:.4f}" for name in _SHOWN_METRICS if name in metrics]:
        lines.append(", ".join(shown))
    text = "\n".join([*lines, *filter(None, [outcome.reason[:_MAX_REASON_LENGTH]])])
    kind = _read_variable(KIND_VARIABLE).lower()
    if kind and kind not in KINDS:
        logger.warning("%s is not one of %s: using %s", KIND_VARIABLE, ", ".join(KINDS), JSON)
    of_slack = (urlsplit(_read_variable(URL_VARIABLE)).hostname or "").endswith("slack.com")
    if kind == SLACK or (of_slack and not kind):
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    # Repeated notifications have the same id.
    notice_id = f"{outcome.run}/{outcome.event}"
    return {"kind": "notice", "version": 1, "id": notice_id, **asdict(outcome), "text": text}
