"""Publishes the results of steps in Kubeflow: artifacts, their metadata in the UI, and the run's outcome.

An artifact holds the step's manifest, not the data: KFP's launcher copies whole artifacts into every pod.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components import environment, hooks, steps
from components.hooks import Outcome, StepEnd
from trainer import storage
from trainer.steps.manifests import (
    Bundle,
    Manifest,
    NothingNew,
    RawData,
    Scores,
    Shards,
    TrainedModel,
    drop_undefined,
    write,
)


def publish_raw_data(result: RawData | NothingNew, raw: Any, *, keep_runs: int) -> str:
    """Publish the raw data, or the end of the run if nothing is new; return what the component returns."""
    if isinstance(result, NothingNew):
        reason = f"{hooks.NOTHING_NEW} since {result.since}: {result.found}"
        run_id = environment.read_run_id()
        _publish(raw, result, {"since": result.since, "found": result.found})
        outcome = Outcome(hooks.NOTHING_NEW, run_id, reason, result.model, result.model_version)
        _report_outcome(
            "download", outcome, folder=storage.join(result.data_root, "notices", run_id) if run_id else ""
        )
        hooks.on_step_end(StepEnd("download", data_root=result.data_root, keep_runs=keep_runs))
        return hooks.NOTHING_NEW
    shown: dict[str, object] = {"uri": result.folder.uri, "source": result.folder.source}
    for split, counts in result.folder.splits.items():
        shown |= {f"{split}_images": counts.images, f"{split}_boxes": counts.boxes}
    _publish(raw, result, shown)
    return hooks.TRAIN


@steps.retry_publishing
def publish_shards(result: Shards, shards: Any, statistics: Any, *, keep_runs: int) -> None:
    """Publish the shards and the page with their statistics, and prune the data root if requested."""
    shown: dict[str, object] = {"uri": result.uri, "fingerprint": result.fingerprint}
    for split, samples in result.samples.items():
        shown |= {f"{split}_samples": samples, f"{split}_boxes": result.boxes[split]}
    _publish(shards, result, shown)
    _copy_to_artifact(result.statistics, statistics)
    hooks.on_step_end(StepEnd("convert-to-shards", data_root=result.data_root, keep_runs=keep_runs))


def publish_model(result: TrainedModel, model: Any) -> None:
    """Publish the trained model."""
    shown = {"uri": result.output, "checkpoint": result.checkpoint}
    _publish(model, result, {**shown, **result.metrics})


@steps.retry_publishing
def publish_scores(
    result: Scores, model: TrainedModel, metrics: Any, report: Any, summary: Any, verdict: Any
) -> str:
    """Publish the scores, the report and the gate's decision; return what the component returns."""
    _publish(metrics, result, result.defined_metrics)
    _copy_to_artifact(storage.join(result.evaluation, "report.html"), report)
    _copy_to_artifact(storage.join(result.evaluation, "report.md"), summary)
    word = "pass" if result.passed else "fail"
    lines = "".join(f"- {line}\n" for line in result.reason.splitlines())
    Path(verdict.path).write_text(f"# Gate: {word}\n\n{lines}")
    verdict.metadata.update(verdict=word, reason=result.reason, rules=", ".join(result.rules))
    if not result.passed:  # Otherwise the export step reports the outcome.
        scores = result.defined_metrics
        outcome = Outcome(hooks.HELD_BACK, model.run, result.reason, result.model, metrics=scores)
        _report_outcome("evaluate", outcome, folder=model.output)
    return word


def publish_bundle(result: Bundle, model: TrainedModel, exported: Any) -> None:
    """Publish the exported model."""
    shown = {"uri": result.model, "name": result.name, "model_version": result.model_version}
    _publish(exported, result, shown)
    scores = drop_undefined(result.metrics)
    outcome = Outcome(hooks.PASSED, model.run, result.gate, result.name, result.model_version, scores)
    _report_outcome("export", outcome, folder=model.output)


def _report_outcome(step: str, outcome: Outcome, *, folder: str) -> None:
    """Report the outcome of the run to the webhook (once per `folder`) and in the pod's status."""
    hooks.on_step_end(StepEnd(step, outcome, folder))
    steps.record_outcome(f"{outcome.event}\n{outcome.reason}")


def _publish(artifact: Any, manifest: Manifest, shown: Mapping[str, object]) -> None:
    write(artifact.path, manifest)
    artifact.metadata.update(shown)


def _copy_to_artifact(uri: str, artifact: Any) -> None:
    Path(artifact.path).write_bytes(storage.read_bytes(uri))
