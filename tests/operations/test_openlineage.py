"""OpenLineage: the events of a run's steps; nothing fails or delays a step."""

import inspect
import json
import logging
import pkgutil
import sys
import time
from datetime import UTC, datetime

import pytest
from webhook import Webhook

from components import environment, preparation, steps
from components.hooks import StepEnd
from operations import notifications, openlineage
from trainer.base import log
from trainer.base.errors import DataError, Interrupted

SOURCE = "sample:images=24,seed=3,size=96"
ASKED = ("debug", {"data.processes": 1})
RUN = "0b9c8d7e-1111-4222-8333-444455556666"


def returns(result, *arguments):
    return result


def fails(error, *arguments):
    raise error


def work_of(function):
    return f"{__name__}:{function.__name__}"


@pytest.fixture
def server(monkeypatch):
    for name in (*openlineage.SECRET_KEYS.values(), "OPENLINEAGE_DISABLED", "KUBERNETES_SERVICE_HOST",
                 steps.TRIES_VARIABLE, "http_proxy", "HTTP_PROXY"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    webhook = Webhook()
    monkeypatch.setenv("OPENLINEAGE_URL", webhook.url + "\n")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "geheim-key\n")
    monkeypatch.setenv(environment.RUN_ID, RUN)
    monkeypatch.setattr(notifications, "_RETRY_WAITS", (0.0,))
    yield webhook
    webhook.close()


def facets_of(thing):
    """All facets of a part of an event, by name."""
    return {name: facet for key, of in thing.items() if "acets" in key for name, facet in of.items()}


def names(datasets):
    return [(each["namespace"], each["name"]) for each in datasets]


def run_step(step, result, *arguments):
    return steps.run(step, work_of(returns), result, *arguments)


@pytest.fixture
def canned(monkeypatch):
    """Let a step's work return what is given as its first argument: that is no argument of the real work."""
    for step, describe in openlineage.STEPS.items():
        monkeypatch.setitem(openlineage.STEPS, step, lambda result, _, *rest, of=describe: of(result, *rest))


def test_a_run_from_its_source_to_the_published_version(server, canned, data_root, shards, tmp_path):
    arguments = (SOURCE, *ASKED, data_root, "", str(tmp_path / "page.html"))
    (raw, _), (made, _) = run_step("prepare", preparation.prepare(*arguments), *arguments)
    assert made["uri"] == shards
    folder = f"{data_root}/runs/first"
    trained = {"output": folder, "config": f"{folder}/config.json", "shards": shards, "best_step": 12,
               "checkpoint": f"{folder}/train/best.pt"}  # fmt: skip
    run_step("train", (trained, {}), made, "", data_root, *ASKED, {}, {}, (None, None), "", "")
    run_step("evaluate", {"metrics": {}}, trained, "coco/AP >= 0.2", "a", "b", "c")
    version = {"model": f"{data_root}/models/sample/v1", "name": "sample", "model_version": "v1"}
    run_step("export", version, trained, "", "", RUN)
    events = server.posted
    assert all(event["schemaURL"].endswith("/OpenLineage.json#/$defs/RunEvent") for event in events)
    assert all(event["producer"].startswith("pkg:generic/kubedet@") for event in events)
    assert [event["eventType"] for event in events] == ["START", "COMPLETE"] * 4
    ended = {event["job"]["name"]: event for event in events[1::2]}
    assert list(ended) == [f"kubedet.{step}" for step in ("prepare", "train", "evaluate", "export")]
    prepared, training, scoring, publishing = ended.values()
    assert names(prepared["inputs"]) == [("sample", "images=24,seed=3,size=96")]
    assert names(prepared["outputs"]) == [("file", raw["uri"]), ("file", shards)]
    assert names(training["inputs"]) == names(prepared["outputs"])[1:]
    assert names(scoring["inputs"])[0] == names(publishing["inputs"])[0] == names(training["outputs"])[0]
    assert names(publishing["inputs"])[1:] == names(scoring["outputs"]) == [("file", f"{folder}/evaluation")]
    assert names(publishing["outputs"]) == [("file", f"{data_root}/models/sample/v1")]
    of_shards = facets_of(prepared["outputs"][1])
    assert of_shards["version"]["datasetVersion"] == made["fingerprint"]
    assert facets_of(training["outputs"][0])["version"]["datasetVersion"] == "step 12"
    # All have the run as their parent; a step has one id, whatever the attempt.
    assert {event["run"]["facets"]["parent"]["run"]["runId"] for event in events} == {RUN}
    assert len({event["run"]["runId"] for event in events}) == 4
    run_step("export", version, trained, "", "", RUN)
    assert server.posted[-1]["run"]["runId"] == publishing["run"]["runId"]
    path, headers = server.asked[0]
    assert path == "/services/T0/B0/api/v1/lineage"
    assert headers["Authorization"] == "Bearer geheim-key"
    assert "geheim" not in json.dumps(server.posted)


def test_addresses_are_named_without_their_secrets(server, canned):
    raw = {
        "uri": "s3://bucket/root/raw/f1",
        "fingerprint": "f1",
        "splits": {"train": {"images": 3, "boxes": 5}},
    }
    source = "coco:https://user:geheim@host/sets/cards?X-Amz-Signature=geheim"
    made = {"uri": "s3://bucket/root/shards/f2", "fingerprint": "f2", "train_samples": 3, "train_boxes": 5}
    run_step("prepare", ((raw, {}), (made, {})), source, *ASKED, "s3://bucket/root", "v7")
    _, prepared = server.posted
    assert names(prepared["inputs"]) == [("https://host", "sets/cards")]
    assert facets_of(prepared["inputs"][0])["version"]["datasetVersion"] == "v7"
    assert names(prepared["outputs"]) == [("s3://bucket", "root/raw/f1"), ("s3://bucket", "root/shards/f2")]
    assert "geheim" not in json.dumps(server.posted)


ARGUMENTS = (SOURCE, *ASKED, "root", "", "page")
MADE = (({"uri": "/root/raw/f", "fingerprint": "f"}, {}), ({"uri": "/root/shards/f", "fingerprint": "f"}, {}))


@pytest.mark.parametrize(
    ("error", "ended", "raised"),
    [
        (DataError("cannot read https://me:geheim@host/x", fix="mend it"), "FAIL", SystemExit),
        (ZeroDivisionError("https://me:geheim@host/x?sig=geheim"), "FAIL", ZeroDivisionError),
        (Interrupted("the step was stopped"), "ABORT", SystemExit),
    ],
)
def test_a_failure_is_told_with_its_reason_and_no_secret(server, monkeypatch, capfd, error, ended, raised):
    describe = openlineage.STEPS["prepare"]
    monkeypatch.setitem(openlineage.STEPS, "prepare", lambda result, _, *rest: describe(result, *rest))
    with pytest.raises(raised):
        steps.run("prepare", work_of(fails), error, *ARGUMENTS)
    started, failed = server.posted
    assert (started["eventType"], failed["eventType"], failed["outputs"]) == ("START", ended, [])
    assert started["run"]["runId"] == failed["run"]["runId"]
    text = failed["run"]["facets"]["errorMessage"]["message"]
    assert ("https://***@host/x" in text) == (ended == "FAIL") and "geheim" not in json.dumps(server.posted)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OPENLINEAGE_URL", ""), ("OPENLINEAGE_URL", None), ("OPENLINEAGE_DISABLED", "True")],
)
def test_nothing_is_sent_where_nobody_asks_for_it(server, canned, monkeypatch, variable, value):
    monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    monkeypatch.setattr(openlineage, "_send", lambda *given: pytest.fail("sent"))
    run_step("prepare", MADE, *ARGUMENTS)
    assert not server.posted


@pytest.mark.parametrize(
    "address", ["geheim", "ftp://geheim/x", "http://[geheim", "http://127.0.0.1:1/geheim/"]
)
def test_a_server_that_is_not_there_is_one_warning_without_its_address(
    server, canned, monkeypatch, capfd, address
):
    monkeypatch.setenv("OPENLINEAGE_URL", address)
    monkeypatch.setenv("NO_PROXY", "*")
    log.setup(logging.DEBUG)
    assert run_step("prepare", MADE, *ARGUMENTS) == MADE
    shown = "".join(capfd.readouterr())
    assert shown.count("not reported to the OpenLineage server") == 1 and "geheim" not in shown


def test_what_cannot_be_described_or_sent_fails_no_step(server, canned, monkeypatch, capfd):
    assert run_step("train", ({}, {}), MADE[1][0], "", "root") == ({}, {})
    assert "OpenLineage server: KeyError" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    run_step("prepare", MADE, *ARGUMENTS)
    assert "pip install 'kubedet[lineage]'" in capfd.readouterr().err


def test_a_server_that_hangs_is_not_waited_for_long(server, monkeypatch, caplog):
    monkeypatch.setattr(openlineage, "_TIMEOUT_SECONDS", 0.1)
    server.release.clear()
    began = time.monotonic()
    openlineage.report(StepEnd("prepare", datetime.now(UTC).isoformat(), ARGUMENTS, error="x"))
    assert "it took too long" in caplog.text and time.monotonic() - began < 2


def test_arguments_are_named_as_those_of_the_work():
    """They are handed on by their places."""
    works = {"prepare": "preparation:prepare", "train": "training:train", "evaluate": "scoring:score",
             "export": "publishing:export_and_publish"}  # fmt: skip
    for step, describe in openlineage.STEPS.items():
        work = pkgutil.resolve_name(f"components.{works[step]}")
        named = [name for name in inspect.signature(describe).parameters if name != "rest"][1:]
        assert named == list(inspect.signature(work).parameters)[: len(named)], step
