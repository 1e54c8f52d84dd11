"""Writes checkpoints and scores validations in a thread of rank 0, from copies in CPU memory."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from trainer import storage
from trainer.base import events
from trainer.base.errors import DamagedError, MissingError
from trainer.config.schema import Config
from trainer.evaluation.coco import evaluate as evaluate_coco
from trainer.evaluation.truth_and_predictions import Predictions, Truth
from trainer.trackers.training_log import TrainingLog
from trainer.training import checkpoint
from trainer.training.checkpoint import State

CHECKPOINTS = "checkpoints"  # folder of checkpoints in a run folder
_BEST_KEYS = ("config", "categories", "fingerprint", "global_batch")
"""Keys of a state that best.pt contains, in addition to the weights."""
_UNUSABLE_ERRORS = (MissingError, checkpoint.DamagedCheckpoint, DamagedError)
_LOG = logging.getLogger("train")


@dataclass(frozen=True)
class Best:
    """Step, epoch and metrics of the best weights."""

    step: int
    epoch: int
    metrics: dict[str, float]


class Recorder:
    """Writes and scores states in a background thread, in the order of calls.

    After a failure no more work is done, and all later calls raise the error.
    """

    def __init__(self, config: Config, output_uri: str, log: TrainingLog, best: Best | None) -> None:
        """Start with the best weights so far, if any. Scores are written to the log."""
        self.best = best  # the best weights so far; read it after `wait`
        self._config, self._output, self._log = config, output_uri, log
        self._folder = storage.join(output_uri, CHECKPOINTS)
        self._saved: State = {}
        self._truth: Truth | None = None
        self._jobs: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._error: Exception | None = None

    def save(self, state: State) -> None:
        """Write a checkpoint of a state, adding `best`; the caller may change the state afterwards.

        Waits for earlier calls, so that at most one copy of the state is in memory.
        """
        self.wait()
        self._saved = _copy_to_host(state)
        self._submit(self._write_checkpoint)

    def score(self, truth: Callable[[], dict[str, Any]], predictions: Predictions) -> None:
        """Score predictions of the last saved weights; write best.pt if these weights are the best so far.

        `truth` returns the ground truth of the validation split; it is called once per run.
        """
        self._submit(lambda: self._score(truth, predictions))

    def write_last_as_best(self) -> None:
        """Write the last saved weights as best.pt, without validation."""
        self._submit(lambda: self._write_best({}))

    def raise_failure(self) -> None:
        """Raise the first failure so far, without waiting."""
        if self._error:
            raise self._error

    def wait(self) -> None:
        """Wait until all earlier calls are done; raises the first failure."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        self.raise_failure()

    def close(self) -> None:
        """Finish the pending work and end the thread."""
        self._thread.shutdown(wait=True)

    def _submit(self, job: Callable[[], object]) -> None:
        def run() -> None:
            if not self._error:
                try:
                    job()
                except Exception as error:
                    self._error = error

        self._jobs.append(self._thread.submit(run))

    def _write_checkpoint(self) -> None:
        self._log.publish()
        state = {**self._saved, "best": asdict(self.best) if self.best else {}}
        checkpoint.write_step(state, self._folder, state["step"], self._config.train.keep_checkpoints)

    def _score(self, truth: Callable[[], dict[str, Any]], predictions: Predictions) -> None:
        state, evaluation = self._saved, self._config.evaluation
        self._truth = self._truth or Truth.from_coco(truth())
        metrics = evaluate_coco(self._truth, predictions, engine=evaluation.engine).metrics
        shown = ", ".join(f"{name} {metrics[name]:.3f}" for name in ("coco/AP", "coco/AP50"))
        _LOG.info("epoch %d: %s", state["epoch"], shown)
        events.emit(events.ValidationScored(metrics=metrics))
        self._log.add("val", {"step": state["step"], "epoch": state["epoch"], **metrics})
        if not self.best or metrics[evaluation.metric] > self.best.metrics[evaluation.metric]:
            self._write_best(metrics)
        # Rewrite the checkpoint, so that a run that resumes from it does not validate again.
        state["validated"] = state["step"]
        self._write_checkpoint()

    def _write_best(self, metrics: dict[str, float]) -> None:
        best = Best(self._saved["step"], self._saved["epoch"], metrics)
        uri = storage.join(self._output, checkpoint.BEST)
        checkpoint.write({**_best_state(self._saved), **asdict(best)}, uri)
        self.best = best


def restore_best(output_uri: str, saved: State) -> Best | None:
    """Restore best.pt from a checkpoint if it is lost or damaged; return None if no checkpoint matches."""
    if not saved["best"]:
        return None
    best = Best(**saved["best"])
    uri = storage.join(output_uri, checkpoint.BEST)
    try:
        checkpoint.verify(uri)
        return best
    except _UNUSABLE_ERRORS as error:
        fault = error.message
    folder = storage.join(output_uri, CHECKPOINTS)
    for candidate in ("", checkpoint.step_uri(folder, best.step)):
        try:
            state = checkpoint.read(candidate) if candidate else saved
        except _UNUSABLE_ERRORS:
            continue
        if state["step"] == best.step:
            checkpoint.write({**_best_state(state), **asdict(best)}, uri)
            _LOG.warning("%s; restored from the checkpoint of step %d", fault, best.step)
            return best
    _LOG.warning(
        "%s; there is no checkpoint of step %d: the next validation writes a new best.pt", fault, best.step
    )
    return None


def _best_state(state: State) -> State:
    """Return the evaluated weights of a state and the metadata needed to use them."""
    return {**{key: state[key] for key in _BEST_KEYS}, "model": checkpoint.evaluated_weights(state)}


def _copy_to_host(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copy_to_host(value) for key, value in state.items()}
    return [_copy_to_host(value) for value in state] if isinstance(state, list | tuple) else state
