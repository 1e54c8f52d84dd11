"""The training loop: from shards to the best checkpoint, on every rank.

Read `train`, then `_Run.fit`. A run is a pure function of configuration, shards and global
batch: stopped anywhere and resumed, on as many processes as there are then, it goes on with
the same global batches and, but for rounding, the same losses.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from trainer import storage
from trainer.base import log
from trainer.base.errors import ConfigError, Interrupted
from trainer.config import parsing
from trainer.config.schema import Config, TrainConfig
from trainer.data.loader import TrainLoader
from trainer.data.sample_order import check_verified, global_batch, shared_weights
from trainer.data.shard_index import ShardDataset, data_root_of
from trainer.evaluation.inference import predict_split
from trainer.launching import job_status
from trainer.launching.distributed import World, broadcast, mean, process_group
from trainer.launching.job_status_reporter import Reporter
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.trackers.experiment_tracking import Tracking, open_tracking
from trainer.trackers.training_log import TrainingLog, read_rows
from trainer.training import checkpoint
from trainer.training.batch_fitting import fitting_batch
from trainer.training.compilation import compile_detector, hold_gradients, load_compiled, save_compiled
from trainer.training.optim import peak_learning_rate
from trainer.training.run_recorder import CHECKPOINTS, Recorder, restore_best
from trainer.training.state import TrainState
from trainer.training.step import TrainStep, compress_gradients

_LOG = logging.getLogger("train")
_COMPILED = "compiled.bin"
_METRIC = "coco/AP50"
_GAIN = 0.02
"""The smallest gain that is reported: less is what chance makes of a small validation split."""


def train(config: Config, shards_uri: str, output_uri: str, *, resume: str = "auto") -> dict[str, Any]:
    """Train a detector; runs in every process that torchrun starts.

    Args:
        config: the whole configuration.
        shards_uri: folder that the shard step wrote.
        output_uri: folder for checkpoints/, best.pt, metrics.jsonl, tensorboard/, result.json.
        resume: "auto" goes on from the newest checkpoint in the folder, "none" starts anew.

    Returns:
        checkpoint (URI of the best), metric (the one that chose), metrics, best_step, steps,
        epochs, ended_early (by train.patience), seconds, images_per_second, resumed_from (step or None),
        processes; in rank 0 advice too ("train longer", or empty).

    Raises:
        Interrupted: stopped by SIGTERM or SIGINT, after saving.
        TrainingError: a loss or gradient that is not finite.
        CheckpointError, DataError, StorageError: see there.
    """
    with process_group() as world, stop_request() as stop:
        run = _Run(config, shards_uri, output_uri, world, resume)
        try:
            return run.fit(stop)
        except Interrupted:
            run.settle()  # The message says that the state is saved.
            run.tracking.finish("stopped")
            raise
        except BaseException:
            run.tracking.finish("failed")
            raise
        finally:
            run.close()


class _Run:
    """A training run in one process: its parts and its position."""

    def __init__(self, config: Config, shards_uri: str, output_uri: str, world: World, resume: str) -> None:
        self.config, self.world, self.output = config, world, output_uri
        self.checkpoints = storage.join(output_uri, CHECKPOINTS)
        self.train_set = ShardDataset(shards_uri, "train")
        self.val_set = ShardDataset(shards_uri, "val") if "val" in self.train_set.index.splits else None
        saved = newest_checkpoint(self.checkpoints, world) if resume == "auto" else None
        self.global_batch = step_size(config, saved, len(self.train_set), world)
        self._check_data()
        if saved is None:
            parsing.check_frozen(config)
        classes, data_root = len(self.train_set.categories), data_root_of(shards_uri)
        self.state = TrainState(config, classes, world, data_root=data_root, new=saved is None)
        self.batch = fitting_batch(config, self.state, self.global_batch, saved)
        self.loader = TrainLoader(
            self.train_set, config.loader, global_batch=self.global_batch,
            batch_size=self.batch["images"], seed=config.train.seed, world=world,
            max_bad_fraction=config.data.max_bad_fraction, epochs=config.train.epochs,
            weights=shared_weights(self.train_set, config.loader, world),
            verified=config.train.negatives == "verified",
        )  # fmt: skip
        self.cadence = Cadence(
            config.train, self.state, images=len(self.train_set), global_batch=self.global_batch
        )
        self.steps = self.cadence.steps
        self.resumed_from = self._resume(saved) if saved else None
        best = restore_best(output_uri, saved) if saved and world.is_main else {}
        if saved and broadcast(bool(saved["best"]) and not best, world):
            self.state.validated = min(self.state.validated, self.state.step - 1)  # validated once more
        self.ended_early = False
        """Whether the training ended before its last step, by `train.patience`."""
        self.has_compiled = False
        """Whether compiled code is kept, as far as this process knows."""
        if config.train.compile_cache:
            load_compiled(storage.join(output_uri, _COMPILED))
        graphs = compile_detector(
            self.state.detector, config.train.compile, world, sizes=1 + len(set(config.loader.sizes))
        )
        self.holds_gradients = graphs and self.loader.passes > 1
        if self.holds_gradients:
            hold_gradients(self.state.parameters)
        model = self.state.distributed()
        if config.train.gradient_compression:
            compress_gradients(model)
        peak, explanation = peak_learning_rate(config.train, self.global_batch)
        if world.is_main:
            _LOG.info(explanation)
        self.train_step = TrainStep(
            self.state, model, dataclasses.replace(config.train, lr=peak), steps=self.steps,
            global_batch=self.global_batch, holds_gradients=self.holds_gradients,
        )  # fmt: skip
        self.log = self.recorder = None
        self.tracking = Tracking({})
        self.reporter = Reporter.from_environment() if world.is_main else Reporter()
        if world.is_main:
            storage.remove_stale(output_uri)
            self.tracking = open_tracking(
                config, output_uri, self.train_set.fingerprint, resumed=resume == "auto"
            )
            self.log = TrainingLog(output_uri, self.state.step, self.state.validated, self.tracking.add)
            if self.log.validation:
                self.reporter.measure({job_status.AP: self.log.validation[job_status.AP]})
            self.recorder = Recorder(config, output_uri, self.log, best, self.reporter)

    def _check_data(self) -> None:
        """Raise an error if the data lack what the configuration needs of them."""
        train = self.config.train
        if train.patience and self.val_set is None:
            raise ConfigError(
                f"train.patience={train.patience} needs a validation split, which {self.train_set.uri} lacks",
                fix="set train.patience=0, or make shards with data.val_fraction above 0",
            )
        if train.negatives == "verified":
            check_verified(self.train_set)

    def fit(self, stop: StopRequest) -> dict[str, Any]:
        """Train to the end, or to a stop request."""
        state, first, stopping = self.state, self.state.step, False
        start = saved_at = time.monotonic()
        batches = self.loader.batches(state.samples)
        with log.progress(
            job_status.TASK, self.steps, job_status.UNIT, done=first, shown=self.world.is_main
        ) as bar:
            self.reporter.show(bar)
            while True:
                if self.cadence.epoch_ended() or stopping or self.cadence.checkpoint_due(saved_at):
                    stopping |= self.train_step.settle()
                    self._save()
                    if self.recorder and self.cadence.weights_are_kept():
                        self.recorder.keep_epoch()
                    self._keep_compiled()
                    saved_at = time.monotonic()
                if stopping and state.step < self.steps:
                    raise self._interrupted()
                if self.val_set is not None and self.cadence.validation_due():
                    # The state is being saved: a signal may end a validation at once.
                    with stop.at_once(self._interrupted):
                        self._validate()
                if state.step == self.steps or self._out_of_patience():
                    break
                step_sums, stopping = self.train_step(
                    [next(batches) for _ in range(self.loader.passes)], stop=stop.requested
                )
                state.sums += step_sums
                state.summed += 1
                if state.step % self.config.train.log_every == 0 or state.step == self.steps:
                    stopping |= self.train_step.settle()
                    bar.note = self._report(time.monotonic() - start, state.step - first)
                bar.update()
                self.reporter.show(bar)
        return self._finish(time.monotonic() - start, state.step - first)

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"training stopped after step {self.state.step} of {self.steps}; "
            f"its state is in {self.checkpoints}",
            fix="run the same command again and it goes on from there",
        )

    def _out_of_patience(self) -> bool:
        """Whether validations have not become better for too long; waits for the score of one just made."""
        patience, state, epoch = self.config.train.patience, self.state, self.cadence.epoch
        if not patience or not self.cadence.epoch_ended() or state.validated < state.step:
            return False
        self.settle()
        best = self.recorder.best if self.recorder else {}
        self.ended_early = broadcast(bool(best) and epoch - best["epoch"] >= patience, self.world)
        if self.ended_early and self.world.is_main:
            _LOG.info(
                "no better %s since epoch %d: the training ends after epoch %d of %d (train.patience=%d)",
                self.config.evaluation.metric, best["epoch"], epoch, self.config.train.epochs, patience,
            )  # fmt: skip
        return self.ended_early

    def _report(self, seconds: float, steps: int) -> str:
        """Log the means since the last report over all ranks; returns the note for the display."""
        state = self.state
        total, *losses, norm = (mean(state.sums, self.world) / state.summed).tolist()
        state.sums.zero_()
        state.summed = 0
        rate = steps * self.global_batch / seconds
        if self.log:
            named = zip(state.detector.loss_names, losses, strict=True)
            row = {
                "step": state.step, "epoch": state.samples / len(self.train_set), "loss": total,
                **{f"loss_{name}": value for name, value in named}, "gradient_norm": norm,
                "lr": max(group["lr"] for group in state.optimizer.param_groups), "images_per_second": rate,
            }  # fmt: skip
            self.log.add("train", row)
        if self.recorder:
            self.recorder.check()
        self.reporter.measure({job_status.LOSS: total, job_status.SPEED: rate})
        return job_status.measured(total, rate)

    def _validate(self) -> None:
        """Detect objects in the validation split; rank 0 scores them while training goes on."""
        state = self.state
        assert self.val_set is not None
        state.share_buffers()
        predictions = predict_split(state.evaluated(), self.val_set, self.config, self.world, task="validate")
        state.detector.train()
        state.validated = state.step
        if self.recorder:
            self.recorder.score(self.val_set.annotations, predictions)

    def _save(self) -> None:
        """Save the state in the background, while training goes on."""
        state = {
            "config": parsing.to_json(self.config),
            "categories": self.train_set.categories,
            "fingerprint": self.train_set.fingerprint,
            "global_batch": self.global_batch,
            "batch": self.batch,
            "epoch": self.cadence.epoch,
            **self.state.state_dict(),
        }
        if self.recorder:
            self.recorder.save(state)

    def _keep_compiled(self) -> None:
        """Keep compiled code once, for processes that go on after this one."""
        uri = storage.join(self.output, _COMPILED)
        enabled = self.config.train.compile_cache and not self.has_compiled and self.state.step > 0
        if self.world.is_main and enabled:
            self.has_compiled = storage.exists(uri) or save_compiled(uri)

    def _resume(self, saved: dict[str, Any]) -> int:
        """Resume from a checkpoint; returns its step."""
        checkpoint.check_same_run(saved, self.config, self.train_set.fingerprint, self.global_batch)
        self.state.load_state_dict(saved)
        if self.world.is_main:
            _LOG.info(job_status.resumed(self.state.step, self.steps, self.global_batch, self.world.size))
        return self.state.step

    def _finish(self, seconds: float, steps: int) -> dict[str, Any]:
        self.settle()
        if self.recorder and not self.recorder.best:
            # Without a validation split the last weights are the ones to use.
            self.recorder.keep_last()
            self.settle()
        best = self.recorder.best if self.recorder else {}
        result = {
            "checkpoint": storage.join(self.output, checkpoint.BEST),
            "metric": self.config.evaluation.metric,
            "metrics": best.get("metrics", {}),
            "best_step": best.get("step"),
            "steps": self.state.step,
            "epochs": self.cadence.epoch if self.ended_early else self.config.train.epochs,
            "ended_early": self.ended_early,
            "seconds": seconds,
            "images_per_second": steps * self.global_batch / seconds if steps else 0.0,
            "resumed_from": self.resumed_from,
            "processes": self.world.size,
        }
        if self.world.is_main and self.log:
            self.log.publish()
            rows = [] if self.ended_early else read_rows(self.output)
            result["advice"] = train_longer(rows, self.config.train.epochs)
            if result["advice"]:
                _LOG.warning(result["advice"])
            storage.write_json(storage.join(self.output, "result.json"), result)
            best_metrics = {f"best/{name.removeprefix('coco/')}": v for name, v in result["metrics"].items()}
            self.tracking.finish("finished", {"checkpoint": result["checkpoint"], **best_metrics})
        self.reporter.close()
        # The first pod that succeeds ends an elastic job, and the controller stops the others: so no process
        # ends before rank 0 has written everything.
        broadcast(None, self.world)
        return result

    def settle(self) -> None:
        """Wait until everything is written. Raises what failed."""
        if self.recorder:
            self.recorder.wait()

    def close(self) -> None:
        """End threads and close files."""
        self.loader.close()
        if self.recorder and self.log:
            self.recorder.close()
            self.reporter.close()
            self.log.close()


class Cadence:
    """Decides after each step whether to save and validate, from the configuration and the state."""

    def __init__(self, config: TrainConfig, state: TrainState, *, images: int, global_batch: int) -> None:
        """Follow a training.

        Args:
            config: how long it is, and how often it saves and validates.
            state: where it is.
            images: of the training split.
            global_batch: images of a step over all processes.
        """
        self._config, self._state = config, state
        self._images, self._global_batch = images, global_batch
        self.steps = math.ceil(config.epochs * images / global_batch)
        """Of the whole training."""

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._state.samples // self._images

    @property
    def is_at_the_end(self) -> bool:
        """Whether the last step of all was made."""
        return self._state.step == self.steps

    def epoch_ended(self) -> bool:
        """Whether the last step completed an epoch, or the training."""
        before = (self._state.samples - self._global_batch) // self._images
        return self.is_at_the_end or (self._state.step > 0 and self.epoch > before)

    def validation_due(self) -> bool:
        """Whether the last step completed an epoch that is validated, and that was not yet."""
        due = self.epoch % self._config.validate_every == 0 or self.is_at_the_end
        return self.epoch_ended() and due and self._state.validated < self._state.step

    def weights_are_kept(self) -> bool:
        """Whether the last step completed an epoch whose weights train.keep_every keeps."""
        every = self._config.keep_every
        return bool(every) and self.epoch_ended() and self.epoch % every == 0

    def checkpoint_due(self, saved_at: float) -> bool:
        """Whether a state within an epoch is to be saved; to be asked in every process.

        Args:
            saved_at: when one was saved last, by `time.monotonic`.
        """
        config, step = self._config, self._state.step
        if config.checkpoint_steps and step % config.checkpoint_steps == 0:
            return True
        # Rank 0's clock decides for all; it is a message, so it is sent only now and then.
        if not config.checkpoint_minutes or step % config.log_every:
            return False
        return broadcast(time.monotonic() - saved_at > config.checkpoint_minutes * 60, self._state.world)


def newest_checkpoint(folder: str, world: World) -> dict[str, Any] | None:
    """Read the newest checkpoint of a run, the same one on every rank; None before the first.

    Rank 0 chooses: machines may see different contents of a shared folder for a minute, and ranks that
    went on from different steps would wait for each other for ever.

    Raises:
        CheckpointError: there are some, and none can be read.
        StorageError: the folder cannot be read, or a rank does not see the file.
    """
    newest = checkpoint.read_latest(folder) if world.is_main else None
    step = broadcast(newest["step"] if newest else None, world)
    return checkpoint.read_step(folder, step) if step is not None and newest is None else newest


def step_size(config: Config, saved: dict[str, Any] | None, samples: int, world: World) -> int:
    """Return the samples of one optimiser step: as configured, or as when the run began.

    Args:
        config: the configuration.
        saved: the checkpoint to go on from, if any. Where it differs in nothing but the number
            of processes, its global batch is kept.
        samples: size of the training split.
        world: the processes.

    Raises:
        ConfigError, DataError: see `global_batch`.
    """
    configured = config.train.global_batch
    if not configured and saved:
        before = parsing.from_json(saved["config"], where="the checkpoint's configuration").train
        now = config.train
        same = (before.batch_size, before.accumulate) == (now.batch_size, now.accumulate)
        configured = saved["global_batch"] if same else 0
    return global_batch(
        samples, batch_size=config.train.batch_size, accumulate=config.train.accumulate,
        processes=world.size, configured=configured,
    )  # fmt: skip


def train_longer(rows: Iterable[Mapping[str, Any]], epochs: int) -> str:
    """Say that a longer training will pay, where AP50 was still rising when it ended.

    Args:
        rows: of metrics.jsonl.
        epochs: how many it was trained.

    Returns:
        The advice; empty where the last validation is not clearly the best, or was the only one.
    """
    *before, last = [row[_METRIC] for row in rows if row["kind"] == "val"] or [-1.0]
    if not before or last - max(before) < _GAIN:
        return ""
    return (
        f"AP50 was still rising at the last validation ({max(before):.3f}, then {last:.3f}): train longer: "
        f"--set train.epochs={2 * epochs}"
    )
