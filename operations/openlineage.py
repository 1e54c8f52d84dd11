"""Events of the OpenLineage standard: a server that is configured learns what each step read and wrote.

https://openlineage.io. The variables are those of its client for Python; in a cluster steps have them from a
Secret. Address and key stand in no log, specification or artifact. Telling never is a reason for a step to
fail or to wait long.
"""

import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any, NamedTuple
from urllib.parse import urljoin

import urllib3

from components import run_ids
from components.hooks import End
from operations import webhook
from trainer import storage
from trainer.base.masking import masked

logger = logging.getLogger(__name__)

SECRET = "kubedet-openlineage"  # noqa: S105 (its name)
"""Name of the Secret in the namespace of the runs. It need not exist: then nobody is told."""

URL, API_KEY, ENDPOINT, NAMESPACE, DISABLED = (
    f"OPENLINEAGE_{name}" for name in ("URL", "API_KEY", "ENDPOINT", "NAMESPACE", "DISABLED")
)

SECRET_KEYS = {"url": URL, "api_key": API_KEY, "endpoint": ENDPOINT, "namespace": NAMESPACE}
"""Keys of the Secret, of which `url` is required, and the variables they become."""

START, COMPLETE, FAIL, ABORT = "START", "COMPLETE", "FAIL", "ABORT"

_PATIENCE = 10.0
"""Seconds for which the end of a step waits until it is told; mostly the time-outs end it before."""
_TIMEOUT = urllib3.Timeout(connect=2, read=3)
_WAITS = (1.0,)
_NAMESPACE = _PIPELINE = "kubedet"
_ENDPOINT = "api/v1/lineage"
_MOST_OF_AN_ERROR = 3000
_MOST_TAGS = 40
_PLACES = ("coco", "voc", "yolo")
"""Kinds of sources that are followed by a place."""


@dataclass(frozen=True)
class Dataset:
    """Something that a step reads or writes."""

    namespace: str
    name: str
    version: str = ""
    """Fingerprint, or what tells one content from another."""
    type: str = "FILE"
    """FILE or MODEL."""
    images: int | None = None
    boxes: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, bool] = field(default_factory=dict)
    """Rules that it was held to, and whether it kept them."""


class Work(NamedTuple):
    """What a step's work is about."""

    data_root: str
    inputs: list[Dataset]
    outputs: list[Dataset]
    """Empty where the work has not been done, or there was nothing to do."""


def at(uri: str, **known: Any) -> list[Dataset]:
    """Return what lies behind a URI, in the standard's names for it; nothing where there is no URI.

    (https://openlineage.io/docs/spec/naming)
    """
    if not uri:
        return []
    if storage.is_local(uri):
        return [Dataset("file", storage.absolute(os.path.expanduser(uri)), **known)]
    # Without a query, which may hold a signature, and without a name and a password.
    authority, _, path = masked(uri).partition("?")[0].partition("://")[2].partition("/")
    return [
        Dataset(f"{storage.scheme(uri)}://{authority.rpartition('@')[2]}", path.strip("/") or "/", **known)
    ]


def _source(source: str, version: str) -> list[Dataset]:
    kind, _, rest = source.strip().partition(":")
    if kind in _PLACES and rest.partition(",")[0].strip() != "2017":
        return at(rest, version=version)
    if kind in ("sample", "openimages", "coco"):
        return [Dataset(kind, masked(rest) or kind, version)]
    return at(source.strip(), version=version)


def _raw(manifest: dict[str, Any]) -> list[Dataset]:
    splits = manifest.get("splits", {}).values()
    counts = (
        {key: sum(split.get(key, 0) for split in splits) for key in ("images", "boxes")} if splits else {}
    )
    return at(manifest["uri"], version=manifest.get("content") or manifest["fingerprint"], **counts)


def _shards(manifest: dict[str, Any]) -> list[Dataset]:
    counts = {
        name: sum(count for key, count in manifest.items() if key.endswith(suffix))
        for name, suffix in (("images", "_samples"), ("boxes", "_boxes"))
    }
    return at(manifest["uri"], version=manifest["fingerprint"], **counts)


def _checkpoint(trained: dict[str, Any], **known: Any) -> list[Dataset]:
    step = trained.get("best_step")
    version = "" if step is None else f"step {step}"
    return at(trained["checkpoint"], version=version, type="MODEL", **known)


def _prepare(
    result: Any, source: str, recipe: str, overrides: Any, data_root: str, version: str, *rest: Any
) -> Work:
    (raw, _), (shards, _) = result or (({"uri": "", "fingerprint": ""}, {}),) * 2
    return Work(data_root, _source(source, version), [*_raw(raw), *_shards(shards)])


def _train(result: Any, data: dict[str, Any], output: str, data_root: str, *rest: Any) -> Work:
    outputs = [*_checkpoint(result[0]), *at(result[0]["config"])] if result else []
    return Work(data_root, _shards(data), outputs)


def _evaluate(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    data_root = storage.parent(storage.parent(trained["shards"]))
    if not result:
        return Work(data_root, _checkpoint(trained) + at(trained["shards"]), [])
    verdict, shown = result["verdict"], list(result["shown"].items())[:_MOST_TAGS]
    inputs = _checkpoint(trained, checks={verdict["rules"]: verdict["verdict"] == "pass"})
    tags = {name: f"{value:.6g}" for name, value in shown}
    outputs = at(storage.join(trained["output"], "evaluation"), tags=tags)
    return Work(data_root, inputs + at(trained["shards"]), outputs)


def _export(result: Any, trained: dict[str, Any], *rest: Any) -> Work:
    inputs = _checkpoint(trained) + at(storage.join(trained["output"], "evaluation"))
    outputs = at(result["model"], version=result["model_version"], type="MODEL") if result else []
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


def _send(end: End, before: Work, after: Work) -> str:
    """Send both events of a step; returns what went wrong, without the address, or nothing."""
    from openlineage.client.serde import Serde

    key = _setting(API_KEY)
    url = urljoin(_setting(URL), _setting(ENDPOINT) or _ENDPOINT)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    kind = ABORT if end.is_stopped else FAIL if end.error else COMPLETE
    run = _run(end, after.data_root)
    now = datetime.now(UTC).isoformat()
    for work, event_type, at_time in ((before, START, end.began), (after, kind, now)):
        error = masked(end.error)[:_MOST_OF_AN_ERROR] if event_type != START else ""
        body = json.dumps(Serde.to_dict(_event(end.step, run, work, event_type, at_time, error))).encode()
        name = f"{URL} (`url` of the Secret)"
        if problem := webhook.post(url, body, name, timeout=_TIMEOUT, waits=_WAITS, headers=headers):
            return problem
    return ""


class _Run(NamedTuple):
    """Whose step it is."""

    id: str
    """Of the step."""
    parent: str
    """Of the run; empty where the step belongs to none."""
    name: str


def _run(end: End, data_root: str) -> _Run:
    name = run_ids.current()
    if not name:
        return _Run(str(uuid.uuid4()), "", "")
    parent = run_of(name, data_root)
    # The same for each attempt: the next one goes on with what this one began.
    return _Run(str(uuid.uuid5(parent, end.step)), str(parent), name)


def run_of(name: str, data_root: str) -> uuid.UUID:
    """Return the standard's id of a run: its own where that is a UUID, as in a cluster.

    Args:
        name: the run's id, or its name on one machine.
        data_root: URI under which its data are kept.
    """
    with suppress(ValueError):
        return uuid.UUID(name)
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{storage.absolute(data_root)}#{name}")


def _event(step: str, run: _Run, work: Work, event_type: str, time: str, error: str) -> Any:
    """Return an event as OpenLineage's client has it."""
    from openlineage.client import event_v2 as parts
    from openlineage.client import facet_v2 as facets

    namespace = _setting(NAMESPACE) or _NAMESPACE
    version = package_version("kubedet")
    facets.set_producer(f"pkg:generic/kubedet@{version}")
    parts.set_producer(f"pkg:generic/kubedet@{version}")
    of_run: dict[str, Any] = {
        "processing_engine": facets.processing_engine_run.ProcessingEngineRunFacet(
            version, "kubedet", version
        )
    }
    if run.parent:
        parent, pipeline = (
            facets.parent_run.Run(run.parent),
            facets.parent_run.Job(namespace, _PIPELINE),
        )
        of_run["parent"] = facets.parent_run.ParentRunFacet(parent, pipeline)
        tag = facets.tags_run.TagsRunFacetFields("run", run.name, "kubedet")
        of_run["tags"] = facets.tags_run.TagsRunFacet([tag])
    if error:
        of_run["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(error, "Python")
    of_job: dict[str, Any] = {"jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "KUBEDET", "STEP")}
    return parts.RunEvent(
        eventTime=time,
        eventType=parts.RunState(event_type),
        run=parts.Run(run.id, of_run),
        job=parts.Job(namespace, f"{_PIPELINE}.{step}", of_job),
        inputs=[_input(each) for each in work.inputs],
        outputs=[_output(each) for each in work.outputs],
    )


def _input(dataset: Dataset) -> Any:
    from openlineage.client import event_v2, facet_v2

    of_input: dict[str, Any] = {}
    if dataset.images is not None:
        statistics = facet_v2.input_statistics_input_dataset
        of_input["inputStatistics"] = statistics.InputStatisticsInputDatasetFacet(dataset.images)
    if dataset.checks:
        quality = facet_v2.data_quality_assertions_dataset
        checks = [quality.Assertion(rule, kept) for rule, kept in dataset.checks.items()]
        of_input["dataQualityAssertions"] = quality.DataQualityAssertionsDatasetFacet(checks)
    name = (dataset.namespace, dataset.name)
    return event_v2.InputDataset(*name, facets=_facets(dataset), inputFacets=of_input)


def _output(dataset: Dataset) -> Any:
    from openlineage.client import event_v2, facet_v2

    of_output: dict[str, Any] = {}
    if dataset.images is not None:
        statistics = facet_v2.output_statistics_output_dataset
        of_output["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(dataset.images)
    name = (dataset.namespace, dataset.name)
    return event_v2.OutputDataset(*name, facets=_facets(dataset), outputFacets=of_output)


def _facets(dataset: Dataset) -> dict[str, Any]:
    from openlineage.client import facet_v2

    facets: dict[str, Any] = {
        "datasetType": facet_v2.dataset_type_dataset.DatasetTypeDatasetFacet(dataset.type)
    }
    if dataset.version:
        versions = facet_v2.dataset_version_dataset
        facets["version"] = versions.DatasetVersionDatasetFacet(dataset.version)
    if dataset.boxes is not None:
        quality = facet_v2.data_quality_metrics_dataset
        boxes = {"boxes": quality.ColumnMetrics(count=dataset.boxes)}
        facets["dataQualityMetrics"] = quality.DataQualityMetricsDatasetFacet(boxes, dataset.images)
    if dataset.tags:
        tags = facet_v2.tags_dataset
        rows = [tags.TagsDatasetFacetFields(key, value, "kubedet") for key, value in dataset.tags.items()]
        facets["tags"] = tags.TagsDatasetFacet(rows)
    return facets


def _setting(name: str) -> str:
    return os.environ.get(name, "").strip()
