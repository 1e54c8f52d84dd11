"""Sends OpenLineage events about each step's data. Errors and secrets of its server stay out of the step."""

import logging
import os
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any
from urllib.parse import urljoin

from components import environment
from components.hooks import StepEnd
from operations.notifications import post, setting
from trainer import storage
from trainer.base.safe_text import redacted

logger = logging.getLogger(__name__)

SECRET = "kubedet-openlineage"  # noqa: S105 (its name)
"""Name of the Secret in the namespace of the runs. Without it nothing is sent."""

SECRET_KEYS = {key: f"OPENLINEAGE_{key.upper()}" for key in ("url", "api_key", "endpoint", "namespace")}
"""Environment variables by the keys of the Secret; `url` is required."""

_TIMEOUT_SECONDS = 10.0  # Seconds that the end of a step waits for the server.

Data = tuple[str, str, str]  # Namespace, name, and fingerprint or step of a checkpoint (may be empty).
Work = tuple[str, list[Data], list[Data]]  # Data root, inputs and outputs; no outputs if it was not done.


def at(uri: str, version: str = "") -> list[Data]:
    """Return the data at a URI, named as in https://openlineage.io/docs/spec/naming; [] without a URI."""
    if not uri:
        return []
    if storage.is_local(uri):
        return [("file", storage.absolute(os.path.expanduser(uri)), version)]
    # Without the query, which may contain a signature, and without user and password.
    authority, _, path = redacted(uri).partition("?")[0].partition("://")[2].partition("/")
    return [(f"{storage.scheme(uri)}://{authority.rpartition('@')[2]}", path.strip("/") or "/", version)]


def _checkpoint(trained: dict[str, Any]) -> list[Data]:
    step = trained.get("best_step")
    return at(trained["checkpoint"], "" if step is None else f"step {step}")


def _prepare(
    result: Any, source: str, recipe: str, overrides: Any, data_root: str, version: str, *rest: Any
) -> Work:
    kind, _, place = source.strip().partition(":")
    if kind in ("sample", "openimages") or (kind == "coco" and place.split(",")[0].strip() == "2017"):
        inputs = [(kind, redacted(place) or kind, version)]
    else:
        inputs = at(place if kind in ("coco", "voc", "yolo") else source.strip(), version)
    if not result:
        return data_root, inputs, []
    (raw, _), (shards, _) = result
    made = at(raw["uri"], raw.get("content") or raw["fingerprint"])
    return data_root, inputs, made + at(shards["uri"], shards["fingerprint"])


def _train(result: Any, data: dict[str, Any], output: str, data_root: str, *rest: Any) -> Work:
    outputs = _checkpoint(result[0]) + at(result[0]["config"]) if result else []
    return data_root, at(data["uri"], data["fingerprint"]), outputs


def _evaluate(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    outputs = at(storage.join(trained["output"], "evaluation")) if result else []
    data_root = storage.parent(storage.parent(trained["shards"]))
    return data_root, _checkpoint(trained) + at(trained["shards"]), outputs


def _export(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    outputs = at(result["model"], result["model_version"]) if result else []
    data_root = storage.parent(storage.parent(trained["shards"]))
    return data_root, _checkpoint(trained) + at(storage.join(trained["output"], "evaluation")), outputs


STEPS: dict[str, Callable[..., Work]] = {  # From a step's result (None if it has none) and its arguments.
    "prepare": _prepare, "train": _train, "evaluate": _evaluate, "export": _export,
}  # fmt: skip


def report(end: StepEnd) -> None:
    """Report start and end of a step that has ended. Raises nothing and waits at most 10 s."""
    is_on = setting("OPENLINEAGE_URL") and setting("OPENLINEAGE_DISABLED").lower() != "true"
    if end.step not in STEPS or not is_on:
        return
    problems: list[str] = []

    def send() -> None:
        try:
            problems.append(_send(end))
        except ImportError:
            problems.append("openlineage-python is not installed (pip install 'kubedet[lineage]')")
        except Exception as problem:  # Its text may contain the address.
            problems.append(type(problem).__name__)

    # Name resolution has no time-out: a thread that hangs is left behind.
    sender = threading.Thread(target=send, name="openlineage", daemon=True)
    sender.start()
    sender.join(_TIMEOUT_SECONDS)
    if problem := problems[0] if problems else "it took too long":
        logger.warning("this step was not reported to the OpenLineage server: %s", problem)


def _send(end: StepEnd) -> str:
    """Send both events of a step; return the problem without the address, or ""."""
    from openlineage.client import event_v2
    from openlineage.client import facet_v2 as facets
    from openlineage.client.serde import Serde

    def datasets(kind: Callable[..., Any], data: list[Data]) -> list[Any]:
        facet = facets.dataset_version_dataset.DatasetVersionDatasetFacet
        return [kind(*name, facets={"version": facet(version)} if version else {}) for *name, version in data]

    data_root, inputs, outputs = STEPS[end.step](end.result, *end.arguments)
    namespace = setting("OPENLINEAGE_NAMESPACE") or "kubedet"
    for module in (facets, event_v2):
        module.set_producer(f"pkg:generic/kubedet@{package_version('kubedet')}")
    name = environment.run_id() or str(uuid.uuid4())
    try:
        parent = uuid.UUID(name)  # In a cluster.
    except ValueError:
        parent = uuid.uuid5(uuid.NAMESPACE_URL, f"{storage.absolute(data_root)}#{name}")
    run_id = str(uuid.uuid5(parent, end.step))  # The same for each attempt.
    run = facets.parent_run.Run(str(parent))
    of_run = {"parent": facets.parent_run.ParentRunFacet(run, facets.parent_run.Job(namespace, "kubedet"))}
    error = redacted(end.error)[:3000]
    failed = {"errorMessage": facets.error_message_run.ErrorMessageRunFacet(error, "Python")} if error else {}
    state = "ABORT" if end.is_stopped else "FAIL" if end.error else "COMPLETE"
    job, now = event_v2.Job(namespace, f"kubedet.{end.step}"), datetime.now(UTC).isoformat()
    url = urljoin(setting("OPENLINEAGE_URL"), setting("OPENLINEAGE_ENDPOINT") or "api/v1/lineage")
    headers = {"Authorization": f"Bearer {key}"} if (key := setting("OPENLINEAGE_API_KEY")) else {}
    for kind, time, made, failure in (("START", end.began, [], {}), (state, now, outputs, failed)):
        event = event_v2.RunEvent(
            eventTime=time, eventType=event_v2.RunState(kind), job=job,
            run=event_v2.Run(run_id, {**of_run, **failure}),
            inputs=datasets(event_v2.InputDataset, inputs), outputs=datasets(event_v2.OutputDataset, made),
        )  # fmt: skip
        body = Serde.to_json(event).encode()
        if problem := post(url, body, "OPENLINEAGE_URL (`url` of the Secret)", headers):
            return problem
    return ""
