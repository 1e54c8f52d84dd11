"""Events of the OpenLineage standard: a server that is configured learns what each step read and wrote.

https://openlineage.io. The variables are those of its client for Python, whose classes make the events; in a
cluster steps have them from a Secret. Address and key stand in no log, specification or artifact. Telling
never is a reason for a step to fail or to wait long.
"""

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any, NamedTuple
from urllib.parse import urljoin

import urllib3

from components import environment
from components.hooks import End
from operations import webhook
from trainer import storage
from trainer.base.safe_text import redacted

logger = logging.getLogger(__name__)

SECRET = "kubedet-openlineage"  # noqa: S105 (its name)
"""Name of the Secret in the namespace of the runs. It need not exist: then nobody is told."""

URL, API_KEY, ENDPOINT, NAMESPACE, DISABLED = (
    f"OPENLINEAGE_{name}" for name in ("URL", "API_KEY", "ENDPOINT", "NAMESPACE", "DISABLED")
)

SECRET_KEYS = {"url": URL, "api_key": API_KEY, "endpoint": ENDPOINT, "namespace": NAMESPACE}
"""Keys of the Secret, of which `url` is required, and the variables they become."""

_PATIENCE = 10.0
"""Seconds for which the end of a step waits until it is told; mostly the time-outs end it before."""
_TIMEOUT = urllib3.Timeout(connect=2, read=3)
_WAITS = (1.0,)
_NAME = "kubedet"
_ENDPOINT = "api/v1/lineage"
_MOST_OF_AN_ERROR = 3000
_MOST_TAGS = 40
_PLACES = ("coco", "voc", "yolo")
"""Kinds of sources that are followed by a place."""


class Data(NamedTuple):
    """Something that a step reads or writes."""

    namespace: str
    name: str
    version: str = ""
    """Fingerprint, or what tells one content from another."""
    type: str = "FILE"
    """FILE or MODEL."""
    images: int | None = None
    boxes: int | None = None
    tags: tuple[tuple[str, str], ...] = ()
    rule: tuple[str, bool] | None = None
    """The rule that it was held to, and whether it kept it."""


class Work(NamedTuple):
    """What a step's work is about."""

    data_root: str
    inputs: list[Data]
    outputs: list[Data]
    """Empty if the work has not been done, or there was nothing to do."""


def at(uri: str, version: str = "", **known: Any) -> list[Data]:
    """Return what is at a URI, by the standard's names (https://openlineage.io/docs/spec/naming)."""
    if not uri:
        return []
    if storage.is_local(uri):
        return [Data("file", storage.absolute(os.path.expanduser(uri)), version, **known)]
    # Without a query, which may hold a signature, and without a name and a password.
    authority, _, path = redacted(uri).partition("?")[0].partition("://")[2].partition("/")
    server = f"{storage.scheme(uri)}://{authority.rpartition('@')[2]}"
    return [Data(server, path.strip("/") or "/", version, **known)]


def _source(source: str, version: str) -> list[Data]:
    kind, _, rest = source.strip().partition(":")
    if kind in _PLACES and rest.partition(",")[0].strip() != "2017":
        return at(rest, version)
    if kind in ("sample", "openimages", "coco"):
        return [Data(kind, redacted(rest) or kind, version)]
    return at(source.strip(), version)


def _shards(manifest: dict[str, Any]) -> list[Data]:
    images, boxes = (
        sum(count for key, count in manifest.items() if key.endswith(end)) for end in ("_samples", "_boxes")
    )
    return at(manifest["uri"], manifest["fingerprint"], images=images, boxes=boxes)


def _checkpoint(trained: dict[str, Any], **known: Any) -> list[Data]:
    step = trained.get("best_step")
    return at(trained["checkpoint"], "" if step is None else f"step {step}", type="MODEL", **known)


def _prepare(
    result: Any, source: str, recipe: str, overrides: Any, data_root: str, version: str, *rest: Any
) -> Work:
    outputs = []
    if result:
        (raw, _), (shards, _) = result
        splits = raw.get("splits", {}).values()
        counts = {key: sum(split.get(key, 0) for split in splits) for key in ("images", "boxes") if splits}
        outputs = at(raw["uri"], raw.get("content") or raw["fingerprint"], **counts) + _shards(shards)
    return Work(data_root, _source(source, version), outputs)


def _train(result: Any, data: dict[str, Any], output: str, data_root: str, *rest: Any) -> Work:
    outputs = [*_checkpoint(result[0]), *at(result[0]["config"])] if result else []
    return Work(data_root, _shards(data), outputs)


def _evaluate(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    rule, outputs = None, []
    if result:
        rule = (result["verdict"]["rules"], result["verdict"]["verdict"] == "pass")
        tags = tuple((name, f"{value:.6g}") for name, value in list(result["shown"].items())[:_MOST_TAGS])
        outputs = at(storage.join(trained["output"], "evaluation"), tags=tags)
    inputs = _checkpoint(trained, rule=rule) + at(trained["shards"])
    return Work(storage.parent(storage.parent(trained["shards"])), inputs, outputs)


def _export(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    inputs = _checkpoint(trained) + at(storage.join(trained["output"], "evaluation"))
    outputs = at(result["model"], result["model_version"], type="MODEL") if result else []
    return Work(storage.parent(storage.parent(trained["shards"])), inputs, outputs)


STEPS: dict[str, Callable[..., Work]] = {
    "prepare": _prepare, "train": _train, "evaluate": _evaluate, "export": _export,
}  # fmt: skip
"""The steps that are told of, each with what describes its work: from its result, None before there is one,
and the arguments that its work is called with."""


def tell(end: End) -> None:
    """Tell of one step, when it has ended: that it began, and how it ended. Raises nothing, hangs nowhere."""
    describe = STEPS.get(end.step)
    if describe is None or not _setting(URL) or _setting(DISABLED).lower() == "true":
        return
    problems: list[str] = []

    def send() -> None:
        try:
            before = describe(None, *end.arguments)
            after = describe(end.result, *end.arguments) if end.result else before
            problems.append(_send(end, before, after))
        except ImportError:
            problems.append("openlineage-python is not installed (pip install 'kubedet[lineage]')")
        except Exception as problem:  # Its text may hold the address.
            problems.append(type(problem).__name__)

    # A look-up of a name cannot be given a time-out: a thread that hangs is left behind.
    sender = threading.Thread(target=send, name="openlineage", daemon=True)
    sender.start()
    sender.join(_PATIENCE)
    if problem := problems[0] if problems else "it took too long":
        logger.warning("OpenLineage's server was not told of this step: %s", problem)


def _setting(name: str) -> str:
    return os.environ.get(name, "").strip()


def run_of(name: str, data_root: str) -> uuid.UUID:
    """Return the standard's id of a run: its own if that is a UUID, as in a cluster.

    Args:
        name: the run's id, or its name on one machine.
        data_root: URI under which its data are kept.
    """
    with suppress(ValueError):
        return uuid.UUID(name)
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{storage.absolute(data_root)}#{name}")


def _send(end: End, before: Work, after: Work) -> str:
    """Send both events of a step; returns what went wrong, without the address, or nothing."""
    from openlineage.client import event_v2
    from openlineage.client import facet_v2 as facets
    from openlineage.client.serde import Serde

    namespace, version = _setting(NAMESPACE) or _NAME, package_version("kubedet")
    facets.set_producer(f"pkg:generic/kubedet@{version}")
    event_v2.set_producer(f"pkg:generic/kubedet@{version}")
    engine = facets.processing_engine_run.ProcessingEngineRunFacet(version, "kubedet", version)
    of_run: dict[str, Any] = {"processing_engine": engine}
    run_id = uuid.uuid4()
    if name := environment.run_id():
        parent = run_of(name, after.data_root)
        # The same for each attempt: the next one goes on with what this one began.
        run_id = uuid.uuid5(parent, end.step)
        of_run["parent"] = facets.parent_run.ParentRunFacet(
            facets.parent_run.Run(str(parent)), facets.parent_run.Job(namespace, _NAME)
        )
        tag = facets.tags_run.TagsRunFacetFields("run", name, "kubedet")
        of_run["tags"] = facets.tags_run.TagsRunFacet([tag])
    error = redacted(end.error)[:_MOST_OF_AN_ERROR]
    failed = {"errorMessage": facets.error_message_run.ErrorMessageRunFacet(error, "Python")} if error else {}
    job_type = facets.job_type_job.JobTypeJobFacet("BATCH", "KUBEDET", "STEP")
    job = event_v2.Job(namespace, f"{_NAME}.{end.step}", {"jobType": job_type})
    kind = "ABORT" if end.is_stopped else "FAIL" if end.error else "COMPLETE"
    now = datetime.now(UTC).isoformat()
    url = urljoin(_setting(URL), _setting(ENDPOINT) or _ENDPOINT)
    headers = {"Authorization": f"Bearer {key}"} if (key := _setting(API_KEY)) else {}
    for work, state, time, further in ((before, "START", end.began, {}), (after, kind, now, failed)):
        event = event_v2.RunEvent(
            eventTime=time, eventType=event_v2.RunState(state), job=job,
            run=event_v2.Run(str(run_id), of_run | further),
            inputs=_datasets(work.inputs, is_input=True), outputs=_datasets(work.outputs, is_input=False),
        )  # fmt: skip
        body = json.dumps(Serde.to_dict(event)).encode()
        place = f"{URL} (`url` of the Secret)"
        if problem := webhook.post(url, body, place, timeout=_TIMEOUT, waits=_WAITS, headers=headers):
            return problem
    return ""


def _datasets(data: Iterable[Data], *, is_input: bool) -> list[Any]:
    from openlineage.client import event_v2
    from openlineage.client import facet_v2 as known

    datasets: list[Any] = []
    for each in data:
        facets: dict[str, Any] = {
            "datasetType": known.dataset_type_dataset.DatasetTypeDatasetFacet(each.type)
        }
        if each.version:
            facets["version"] = known.dataset_version_dataset.DatasetVersionDatasetFacet(each.version)
        if each.boxes is not None:
            quality = known.data_quality_metrics_dataset
            boxes = {"boxes": quality.ColumnMetrics(count=each.boxes)}
            facets["dataQualityMetrics"] = quality.DataQualityMetricsDatasetFacet(boxes, each.images)
        if each.tags:
            tags = known.tags_dataset
            fields = [tags.TagsDatasetFacetFields(key, value, "kubedet") for key, value in each.tags]
            facets["tags"] = tags.TagsDatasetFacet(fields)
        own: dict[str, Any] = {}
        if each.images is not None:
            facet = (
                known.input_statistics_input_dataset.InputStatisticsInputDatasetFacet
                if is_input else known.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
            )  # fmt: skip
            own["inputStatistics" if is_input else "outputStatistics"] = facet(each.images)
        if each.rule:
            rules = known.data_quality_assertions_dataset
            checked = rules.DataQualityAssertionsDatasetFacet([rules.Assertion(*each.rule)])
            own["dataQualityAssertions"] = checked
        if is_input:
            datasets.append(event_v2.InputDataset(each.namespace, each.name, facets=facets, inputFacets=own))
        else:
            datasets.append(
                event_v2.OutputDataset(each.namespace, each.name, facets=facets, outputFacets=own)
            )
    return datasets
