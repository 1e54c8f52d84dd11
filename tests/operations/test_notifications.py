"""Notifications: content and events, sent once, and the address stays secret."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest
import urllib3
from web_server import WebServer

from components import reports, run_end, steps
from operations import notifications
from operations.notifications import EVENTS, FAILED, HELD_BACK, PASSED, Outcome, notify
from pipelines import run
from pipelines.run import Options
from trainer.base import log
from trainer.base.errors import KubedetError, StorageError
from trainer.steps.manifests import Bundle, Scores, TrainedModel

METRICS = {"coco/AP": 0.29, "coco/AP50": 0.5}
REFUSED = Outcome(HELD_BACK, "20261123-ab", "coco/AP 0.29 < 0.5 & <baseline>", "pets", metrics=METRICS)


class Webhook:
    """Answers with `codes`, one a request, the last again and again; a code of 3xx names `elsewhere`."""

    def __init__(self):
        self.posted = []
        """Body of each request."""
        self.codes = [200]
        self.elsewhere = ""
        self.release = threading.Event()
        """Answers wait for it."""
        self.release.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                hook.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                hook.release.wait(10)
                self.send_response(hook.codes.pop(0) if len(hook.codes) > 1 else hook.codes[0])
                self.send_header("Content-Length", "0")
                if hook.elsewhere:
                    self.send_header("Location", hook.elsewhere)
                self.end_headers()

        self._server = WebServer(Handler)
        self.url = f"{self._server.url}/services/T0/B0/geheim"

    def close(self):
        self.release.set()
        self._server.server_close()


@pytest.fixture
def hook(monkeypatch):
    """A webhook that the environment names; further tries come at once."""
    for name in (*notifications.SECRET_KEYS.values(), "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notifications, "_RETRY_WAITS", (0.0, 0.0))
    webhook = Webhook()
    monkeypatch.setenv(
        notifications.URL_VARIABLE, webhook.url + "\n"
    )  # as `kubectl create secret --from-file` leaves it
    yield webhook
    webhook.close()


def test_the_plain_form_has_every_field(hook):
    assert notify(REFUSED)
    (body,) = hook.posted
    text = body.pop("text")
    assert body == {
        "kind": "notice",
        "version": 1,
        "id": "20261123-ab/held back",
        "event": "held back",
        "run": "20261123-ab",
        "reason": REFUSED.reason,
        "model": "pets",
        "model_version": "",
        "metrics": METRICS,
    }
    assert "held back by the gate" in text and "coco/AP 0.2900, coco/AP50 0.5000" in text


def test_slacks_form_is_a_text_whose_signs_mean_nothing(hook, monkeypatch):
    monkeypatch.setenv(notifications.KIND_VARIABLE, "slack")
    assert notify(REFUSED)
    (body,) = hook.posted
    assert set(body) == {"text"} and body["text"].endswith("coco/AP 0.29 &lt; 0.5 &amp; &lt;baseline&gt;")


def test_only_the_events_that_are_chosen_are_told(hook, monkeypatch, caplog):
    monkeypatch.setenv(notifications.ON_VARIABLE, "Failed, held-back, weekends")
    assert [notify(Outcome(event, "r")) for event in EVENTS] == [True, False, False, True, False]
    assert "no event weekends" in caplog.text
    monkeypatch.delenv(notifications.URL_VARIABLE)
    assert not notify(Outcome(FAILED, "r")) and len(hook.posted) == 2


def test_what_passes_is_tried_again_and_what_does_not_is_not(hook):
    hook.codes = [503, 429, 200]
    assert notify(REFUSED) and len(hook.posted) == 3
    hook.codes = [404]
    assert not notify(REFUSED) and len(hook.posted) == 4


def test_a_redirect_is_not_followed(hook, caplog):
    other = Webhook()
    hook.codes, hook.elsewhere = [307], other.url
    assert not notify(REFUSED) and "HTTP code 307" in caplog.text
    assert len(hook.posted) == 1 and not other.posted
    other.close()


def test_one_that_takes_it_and_never_answers_is_not_asked_twice(hook, monkeypatch, caplog):
    monkeypatch.setattr(notifications, "_TIMEOUT", urllib3.Timeout(connect=5, read=0.2))
    hook.release.clear()
    assert not notify(REFUSED) and len(hook.posted) == 1
    assert "did not answer" in caplog.text


@pytest.mark.parametrize(
    "address",
    ["geheim", "ftp://geheim/x", "http://[geheim", "http://127.0.0.1:1/geheim", "http://geheim.invalid/x"],
)
def test_nothing_is_fatal_and_no_line_has_the_address(hook, monkeypatch, capfd, address):
    monkeypatch.setenv(notifications.URL_VARIABLE, address)
    monkeypatch.setenv("NO_PROXY", "*")
    log.setup(logging.DEBUG)
    assert not notify(REFUSED)
    shown = "".join(capfd.readouterr())
    assert "cannot send the notification" in shown and "geheim" not in shown


def test_an_event_is_told_once_of_a_run(hook, tmp_path, monkeypatch):
    folder = str(tmp_path / "run")
    assert [notify(REFUSED, folder), notify(REFUSED, folder)] == [True, False]
    assert notify(Outcome(PASSED, "r"), folder) and len(hook.posted) == 2

    def refused(uri, data):
        raise StorageError("the store is away")

    monkeypatch.setattr("trainer.storage.create", refused)
    assert notify(REFUSED, folder)


def artifact(tmp_path, name):
    return SimpleNamespace(path=str(tmp_path / name), metadata={})


@pytest.fixture
def trained(tmp_path):
    output = str(tmp_path / "runs" / "20261123-ab")
    return TrainedModel(data_root=str(tmp_path), output=output, shards=f"{tmp_path}/shards/f", metrics={})


def test_the_evaluation_tells_of_what_the_gate_held_back(hook, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(steps, "TERMINATION_LOG", tmp_path / "termination-log")
    artifacts = [artifact(tmp_path, name) for name in ("metrics", "report", "summary", "verdict")]
    (tmp_path / "report.html").touch()
    (tmp_path / "report.md").touch()
    scores = Scores(
        data_root=str(tmp_path), evaluation=str(tmp_path), model="pets",
        metrics={**METRICS, "coco/APs": -1.0},
        passed=True, reason="coco/AP 0.29 >= 0.2: passed", rules=["coco/AP >= 0.2"],
    )  # fmt: skip
    reports.publish_scores(scores, trained, *artifacts)
    assert hook.posted == []
    for _ in range(2):  # as a step that is tried again
        reports.publish_scores(scores.model_copy(update={"passed": False}), trained, *artifacts)
    (body,) = hook.posted
    assert (body["event"], body["run"], body["model"]) == ("held back", "20261123-ab", "pets")
    assert body["metrics"] == METRICS and "coco/AP" in body["reason"]
    # The clean-up finds what the step recorded, and sends no second notice.
    ended = SimpleNamespace(exit_code=0, message=steps.TERMINATION_LOG.read_text())
    main = SimpleNamespace(name="main", state=SimpleNamespace(terminated=ended))
    pod = SimpleNamespace(status=SimpleNamespace(container_statuses=[main]))
    monkeypatch.setattr(run_end, "_list_pods", lambda run_id: [pod])
    outcome = run_end.clean_up("", "ab", "RUNNING", str(tmp_path / "outcome.md"))
    assert outcome == {"state": "held back", "reason": body["reason"]} and len(hook.posted) == 1


def test_the_export_tells_of_what_is_published(hook, trained, tmp_path):
    bundle = Bundle(
        data_root=str(tmp_path), model="models/pets/v2", name="pets", model_version="v2", formats=["onnx"],
        metrics=METRICS, gate="coco/AP 0.29 >= 0.2: passed",
    )  # fmt: skip
    for _ in range(2):
        reports.publish_bundle(bundle, trained, artifact(tmp_path, "exported"))
    (body,) = hook.posted
    assert (body["event"], body["model"], body["model_version"]) == ("passed", "pets", "v2")
    assert body["metrics"] == METRICS


@pytest.mark.parametrize(
    ("state", "told", "event"), [("COMPLETE", 0, ""), ("FAILED", 1, "failed"), ("CANCELED", 1, "stopped")]
)
def test_the_clean_up_tells_of_what_failed_or_was_ended(hook, tmp_path, monkeypatch, state, told, event):
    failed = [run_end.Failure("", "train", "no memory", 1)] if state == "FAILED" else []
    monkeypatch.setattr(run_end, "find_failures", lambda pods: failed)
    for _ in range(2):
        run_end.clean_up("", "ab", state, str(tmp_path / "outcome.md"))
    assert [(body["event"], body["run"]) for body in hook.posted] == [(event, "ab")] * told
    if state == "FAILED":
        assert hook.posted[0]["reason"] == "train: no memory"


@pytest.mark.parametrize(("stopped", "told"), [(False, 1), (True, 0)])
def test_kubedet_run_tells_of_its_own_failure(hook, tmp_path, monkeypatch, capsys, stopped, told):
    monkeypatch.setattr(run, "_run_steps", lambda *given: stopped)
    monkeypatch.setattr(run, "check_options", lambda options: None)
    with pytest.raises(KubedetError):
        run.run(Options("mine", output=str(tmp_path)))
    assert [(body["event"], body["run"]) for body in hook.posted] == [("failed", "mine")] * told
    record = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert record["status"] == ("interrupted" if stopped else "failed") and "geheim" not in json.dumps(record)
