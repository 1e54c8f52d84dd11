"""Sends one event of OpenLineage: a process of its own, started by `components.lineage_events`.

    python -m components.lineage_sender < EVENT

prints what went wrong, without the address, or nothing.
"""

import json
import os
import sys
from importlib.metadata import version as package_version
from typing import Any
from urllib.parse import urljoin

import urllib3

from components import lineage_events, posting

_TIMEOUT = urllib3.Timeout(connect=2, read=3)
_WAITS = (1.0,)
_NAMESPACE = "kubedet"
_PIPELINE = "kubedet"
_ENDPOINT = "api/v1/lineage"


def event_of(step_event: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return an event as OpenLineage wants it.

    Args:
        step_event: as `lineage_events` tells it.
        namespace: of the jobs.
    """
    from openlineage.client import event_v2 as parts
    from openlineage.client import facet_v2 as facets
    from openlineage.client.serde import Serde

    version = package_version("kubedet")
    facets.set_producer(f"pkg:generic/kubedet@{version}")
    parts.set_producer(f"pkg:generic/kubedet@{version}")
    of_run: dict[str, Any] = {
        "processing_engine": facets.processing_engine_run.ProcessingEngineRunFacet(
            version, "kubedet", version
        )
    }
    if step_event["parent"]:
        parent, pipeline = (
            facets.parent_run.Run(step_event["parent"]),
            facets.parent_run.Job(namespace, _PIPELINE),
        )
        of_run["parent"] = facets.parent_run.ParentRunFacet(parent, pipeline)
        tag = facets.tags_run.TagsRunFacetFields("run", step_event["name"], "kubedet")
        of_run["tags"] = facets.tags_run.TagsRunFacet([tag])
    if step_event["error"]:
        of_run["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(step_event["error"], "Python")
    of_job: dict[str, Any] = {"jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "KUBEDET", "STEP")}
    event = parts.RunEvent(
        eventTime=step_event["time"],
        eventType=parts.RunState(step_event["type"]),
        run=parts.Run(step_event["run"], of_run),
        job=parts.Job(namespace, f"{_PIPELINE}.{step_event['step']}", of_job),
        inputs=[_input(each) for each in step_event["inputs"]],
        outputs=[_output(each) for each in step_event["outputs"]],
    )
    sent: dict[str, Any] = Serde.to_dict(event)
    return sent


def _input(dataset: dict[str, Any]) -> Any:
    from openlineage.client import event_v2, facet_v2

    of_input: dict[str, Any] = {}
    if dataset["images"] is not None:
        statistics = facet_v2.input_statistics_input_dataset
        of_input["inputStatistics"] = statistics.InputStatisticsInputDatasetFacet(dataset["images"])
    if dataset["checks"]:
        quality = facet_v2.data_quality_assertions_dataset
        checks = [quality.Assertion(rule, kept) for rule, kept in dataset["checks"].items()]
        of_input["dataQualityAssertions"] = quality.DataQualityAssertionsDatasetFacet(checks)
    name = (dataset["namespace"], dataset["name"])
    return event_v2.InputDataset(*name, facets=_facets(dataset), inputFacets=of_input)


def _output(dataset: dict[str, Any]) -> Any:
    from openlineage.client import event_v2, facet_v2

    of_output: dict[str, Any] = {}
    if dataset["images"] is not None:
        statistics = facet_v2.output_statistics_output_dataset
        of_output["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(dataset["images"])
    name = (dataset["namespace"], dataset["name"])
    return event_v2.OutputDataset(*name, facets=_facets(dataset), outputFacets=of_output)


def _facets(dataset: dict[str, Any]) -> dict[str, Any]:
    from openlineage.client import facet_v2

    facets: dict[str, Any] = {
        "datasetType": facet_v2.dataset_type_dataset.DatasetTypeDatasetFacet(dataset["type"])
    }
    if dataset["version"]:
        versions = facet_v2.dataset_version_dataset
        facets["version"] = versions.DatasetVersionDatasetFacet(dataset["version"])
    if dataset["boxes"] is not None:
        quality = facet_v2.data_quality_metrics_dataset
        boxes = {"boxes": quality.ColumnMetrics(count=dataset["boxes"])}
        facets["dataQualityMetrics"] = quality.DataQualityMetricsDatasetFacet(boxes, dataset["images"])
    if dataset["tags"]:
        tags = facet_v2.tags_dataset
        rows = [tags.TagsDatasetFacetFields(key, value, "kubedet") for key, value in dataset["tags"].items()]
        facets["tags"] = tags.TagsDatasetFacet(rows)
    return facets


def send(step_event: dict[str, Any]) -> str:
    """Send an event; returns what went wrong, without the address, or nothing."""
    namespace = _setting(lineage_events.NAMESPACE) or _NAMESPACE
    try:
        event = event_of(step_event, namespace)
    except ImportError:
        return "the package openlineage-python is not installed (pip install 'kubedet[lineage]')"
    key = _setting(lineage_events.API_KEY)
    url = urljoin(_setting(lineage_events.URL), _setting(lineage_events.ENDPOINT) or _ENDPOINT)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    name = f"{lineage_events.URL} (`url` of the Secret)"
    body = json.dumps(event).encode()
    return posting.post(url, body, name, timeout=_TIMEOUT, waits=_WAITS, headers=headers)


def _setting(name: str) -> str:
    return os.environ.get(name, "").strip()


def main() -> None:
    """Send the event that stdin holds."""
    try:
        problem = send(json.load(sys.stdin))
    except Exception as error:  # Its text may hold the address.
        problem = type(error).__name__
    print(problem)


if __name__ == "__main__":
    main()
