"""Writes checkpoints and scores validations in the background, while the training goes on.

A thread of rank 0 works on copies in the host's memory, so that neither a slow store nor the
scoring of many detections holds the devices up.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import Tensor

from trainer import storage
from trainer.base.errors import DamagedError, MissingError
from trainer.config.schema import Config
from trainer.evaluation.coco_metrics import evaluate as evaluate_coco
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.launching import job_status
from trainer.launching.job_status_reporter import Reporter
from trainer.trackers.training_log import TrainingLog
from trainer.training import checkpoint

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in its own."""
_DESCRIPTION = ("config", "categories", "fingerprint", "global_batch")
"""What best.pt and the weights of an epoch have of a state besides the weights."""
_LOG = logging.getLogger("train")


class Recorder:
    """Writes and scores states in a background thread, in the order of the calls.

    The first failure ends the work, and every later call raises it: no checkpoint may claim a
    validation that was not scored.
    """

    def __init__(
        self,
        config: Config,
        output_uri: str,
        log: TrainingLog,
        best: dict[str, Any],
        reporter: Reporter | None = None,
    ) -> None:
        """Go on from `best`: step, epoch and metrics of the best validation so far, or empty.

        The scores of validations go to the log, and to the job's status where there is a `reporter`.
        """
        self.best = best
        """Of the best validation so far. To be read after `wait`."""
        self._config, self._output, self._log = config, output_uri, log
        self._reporter = reporter or Reporter()
        self._saved: dict[str, Any] = {}
        self._truth: Truth | None = None
        self._jobs: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._error: Exception | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint of a step.

        Waits for earlier calls: there is never more than one copy of the state.

        Args:
            state: everything needed to go on but `best`. It may change afterwards.
        """
        self.wait()
        self._saved = _copy_to_host(state)
        self._start(self._write)

    def score(self, truth: Callable[[], Truth | dict[str, Any]], predictions: Predictions) -> None:
        """Score the predictions of the weights that were saved last, and keep the best weights as best.pt.

        Args:
            truth: gives the ground truth of the validation split; called once a run.
            predictions: all detections in the split.
        """
        self._start(lambda: self._score(truth, predictions))

    def keep_last(self) -> None:
        """Keep the weights that were saved last as the best, where nothing validates them."""
        self._start(lambda: self._keep({}))

    def keep_epoch(self) -> None:
        """Keep the weights that were saved last as those of their epoch, whatever they score."""
        self._start(self._keep_epoch)

    def check(self) -> None:
        """Raise what has failed, if anything has; does not wait."""
        if self._error:
            raise self._error

    def wait(self) -> None:
        """Wait until all earlier calls are done. Raises what has failed."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        self.check()

    def close(self) -> None:
        """Finish the pending work and end the thread."""
        self._thread.shutdown(wait=True)

    def _start(self, job: Callable[[], None]) -> None:
        self._jobs.append(self._thread.submit(self._run_guarded, job))

    def _run_guarded(self, job: Callable[[], None]) -> None:
        if self._error:
            return
        try:
            job()
        except Exception as error:
            self._error = error

    def _write(self) -> None:
        self._log.publish()
        folder, step = storage.join(self._output, CHECKPOINTS), self._saved["step"]
        state = {**self._saved, "best": self.best}
        checkpoint.write_step(state, folder, step, self._config.train.keep_checkpoints)

    def _score(self, truth: Callable[[], Truth | dict[str, Any]], predictions: Predictions) -> None:
        state, evaluation = self._saved, self._config.evaluation
        if self._truth is None:
            ground_truth = truth()
            self._truth = ground_truth if isinstance(ground_truth, Truth) else Truth.from_coco(ground_truth)
        metrics = evaluate_coco(self._truth, predictions, engine=evaluation.engine).metrics
        _LOG.info(job_status.scored(state["epoch"], metrics))
        self._reporter.measure({job_status.AP: metrics[job_status.AP]})
        self._log.add("val", {"step": state["step"], "epoch": state["epoch"], **metrics})
        if not self.best or metrics[evaluation.metric] > self.best["metrics"][evaluation.metric]:
            self._keep(metrics)
        # Once more: a run that resumes from here need not validate again.
        state["validated"] = state["step"]
        self._write()

    def _keep(self, metrics: dict[str, float]) -> None:
        state = self._saved
        self.best = {"step": state["step"], "epoch": state["epoch"], "metrics": metrics}
        checkpoint.write({**_weights(state), **self.best}, storage.join(self._output, checkpoint.BEST))

    def _keep_epoch(self) -> None:
        state = self._saved
        facts = {"step": state["step"], "epoch": state["epoch"], "metrics": {}}
        folder = storage.join(self._output, CHECKPOINTS)
        checkpoint.write({**_weights(state), **facts}, checkpoint.epoch_uri(folder, state["epoch"]))


def restore_best(output_uri: str, saved: dict[str, Any]) -> dict[str, Any]:
    """Write best.pt again where it is lost or damaged, from a checkpoint of the same step.

    Args:
        output_uri: the run's folder.
        saved: the checkpoint that the run goes on from; its "best" tells which weights best.pt had.

    Returns:
        What "best" says; {} where no checkpoint has those weights: the next validation then chooses anew.

    Raises:
        StorageError: the folder cannot be read or written.
    """
    best: dict[str, Any] = saved["best"]
    if not best:
        return {}
    uri, folder = storage.join(output_uri, checkpoint.BEST), storage.join(output_uri, CHECKPOINTS)
    try:
        checkpoint.check(uri)
        return best
    except (MissingError, checkpoint.DamagedCheckpoint, DamagedError) as error:
        fault = error.message
    for state in _candidates(folder, saved, best):
        if state["step"] == best["step"]:
            checkpoint.write({**_weights(state), **best}, uri)
            _LOG.warning("%s; mended: written again from the checkpoint of step %d", fault, best["step"])
            return best
    _LOG.warning(
        "%s; no checkpoint of its step %d is left: the next validation chooses anew", fault, best["step"]
    )
    return {}


def _candidates(folder: str, saved: dict[str, Any], best: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the states that may be those of the best validation."""
    yield saved
    for read in (
        lambda: checkpoint.read_step(folder, best["step"]),
        lambda: checkpoint.read(checkpoint.epoch_uri(folder, best["epoch"])),
    ):
        with suppress(MissingError, checkpoint.DamagedCheckpoint, DamagedError):
            yield read()


def _weights(state: dict[str, Any]) -> dict[str, Any]:
    """The weights to evaluate, and what is needed to use them."""
    return {**{key: state[key] for key in _DESCRIPTION}, "model": checkpoint.model_state(state)}


def _copy_to_host(state: Any) -> Any:
    """The same in the host's memory, sharing none of it."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copy_to_host(value) for key, value in state.items()}
    return [_copy_to_host(value) for value in state] if isinstance(state, list | tuple) else state
