"""The training loop: from shards to the best checkpoint, on every rank.

Start reading at `train`, then `_Run.fit`. Configuration, shards and global batch determine a run: if it is
stopped and resumed on any number of processes, it continues with the same global batches and, except for
rounding, the same losses.
"""

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from trainer import storage
from trainer.base import events, log
from trainer.base.errors import ConfigError, Interrupted
from trainer.config import parsing
from trainer.config.schema import Config
from trainer.data.loader import TrainLoader
from trainer.data.sample_order import global_batch_size, image_weights
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.inference import predict_split
from trainer.launching import job_status
from trainer.launching.distributed import World, all_reduce_sum, broadcast, process_group
from trainer.launching.stop_signals import StopRequest, stop_request
from trainer.model.pretrained import DATA_ROOT
from trainer.trackers.experiment_tracking import Tracking, open_tracking
from trainer.trackers.training_log import TrainingLog
from trainer.training import checkpoint
from trainer.training.optim import scale_to_batch
from trainer.training.run_recorder import CHECKPOINTS, Best, Recorder, restore_best
from trainer.training.schedule import Schedule
from trainer.training.state import TrainState
from trainer.training.step import TrainStep, allocate_gradients, compile_detector

_LOG = logging.getLogger("train")


def train(
    config: Config, shards_uri: str, output_uri: str, *, resume: str = "auto", data_root: str = DATA_ROOT
) -> dict[str, Any]:
    """Train a detector; runs in every process that torchrun starts.

    It writes checkpoints/, best.pt, metrics.jsonl, tensorboard/ and result.json to the output folder.
    `resume` is "auto" (from the newest checkpoint) or "none". `data_root` contains the mirror of weights.

    Returns:
        checkpoint (URI of the best one), metric (that selected it), metrics, best_step, steps, epochs,
        ended_early (for train.patience), seconds, images_per_second, resumed_from (step or None), processes.

    Raises:
        Interrupted: stopped by SIGTERM or SIGINT, after saving.
    """
    with process_group() as world, stop_request() as stop:
        run = _Run(config, shards_uri, output_uri, world, resume, data_root)
        try:
            return run.fit(stop)
        except Interrupted:
            run.wait_for_writes()  # The message says that the state is saved.
            run.tracking.finish("stopped")
            raise
        except BaseException:
            run.tracking.finish("failed")
            raise
        finally:
            run.close()


class _Run:
    """A training run in one process: its components and progress."""

    def __init__(
        self,
        config: Config,
        shards_uri: str,
        output_uri: str,
        world: World,
        resume: str,
        data_root: str = DATA_ROOT,
    ) -> None:
        self.config, self.world, self.output = config, world, output_uri
        self.checkpoints = storage.join(output_uri, CHECKPOINTS)
        self.train_set = ShardDataset(shards_uri, "train")
        self.val_set = ShardDataset(shards_uri, "val") if "val" in self.train_set.index.splits else None
        saved = newest_checkpoint(self.checkpoints, world) if resume == "auto" else None
        self.global_batch = choose_global_batch(config, saved, len(self.train_set), world)
        if config.train.patience and self.val_set is None:
            raise ConfigError(
                f"train.patience={config.train.patience} needs a validation split, which {shards_uri} lacks",
                fix="set train.patience=0, or create shards with data.val_fraction above 0",
            )
        if saved is None:
            parsing.check_no_frozen_random_weights(config)
        scaled, explanation = scale_to_batch(config.train, self.global_batch)
        self.state = TrainState(
            dataclasses.replace(config, train=scaled),
            len(self.train_set.categories),
            world,
            data_root=data_root,
            new=saved is None,
        )
        self.loader = TrainLoader(
            self.train_set,
            config.loader,
            global_batch=self.global_batch,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            world=world,
            max_bad_fraction=config.data.max_bad_fraction,
            epochs=config.train.epochs,
            weights=image_weights(self.train_set, config.loader, world),
        )
        self.resumed_from: int | None = saved["step"] if saved else None
        best: Best | None = None
        if saved:
            checkpoint.check_same_run(saved, config, self.train_set.fingerprint, self.global_batch)
            self.state.load_state_dict(saved)
            if world.is_main:
                best = restore_best(output_uri, saved)
            if broadcast(bool(saved["best"]) and not best, world):
                self.state.validated = min(self.state.validated, self.state.step - 1)  # Validate again.
        seconds = saved["seconds"] if saved else 0.0
        self.schedule = Schedule(config, len(self.train_set), self.global_batch, self.state, seconds=seconds)
        if saved and world.is_main:
            steps = self.schedule.expected_steps
            _LOG.info(
                "resumed at step %d of %d: %d images per step on %d processes",
                self.state.step,
                steps,
                self.global_batch,
                world.size,
            )
            events.emit(events.TrainingResumed(step=self.state.step, steps=steps))
        self.ended_early = False
        self.sums = torch.zeros(len(self.state.detector.loss_names) + 2, device=world.device)
        """Sums in this process since the last logged row: total loss, each loss, gradient norm."""
        self.summed = 0  # steps in `sums`
        graphs = compile_detector(
            self.state.detector, config.train.compile, world, sizes=1 + len(set(config.loader.sizes))
        )
        self.keeps_gradients = graphs and self.loader.pass_count > 1
        if self.keeps_gradients:
            allocate_gradients(self.state.parameters)
        model = self.state.wrap_ddp()
        self.train_step = TrainStep(
            self.state,
            model,
            scaled,
            schedule=self.schedule,
            global_batch=self.global_batch,
            keeps_gradients=self.keeps_gradients,
        )
        self.log = self.recorder = None
        self.tracking = Tracking({})
        if world.is_main:
            _LOG.info(explanation)
            storage.remove_stale(output_uri)
            self.tracking = open_tracking(
                config, output_uri, self.train_set.fingerprint, resumed=resume == "auto"
            )
            self.log = TrainingLog(output_uri, self.state.step, self.state.validated, self.tracking.add)
            self.recorder = Recorder(config, output_uri, self.log, best)

    def fit(self, stop: StopRequest) -> dict[str, Any]:
        """Train until the end or a stop request; return the result of `train`."""
        state, schedule, first, stopping = self.state, self.schedule, self.state.step, False
        start = saved_at = time.monotonic()
        batches = self.loader.batches(state.samples)
        with log.progress(
            job_status.TASK, schedule.expected_steps, job_status.UNIT, done=first, shown=self.world.is_main
        ) as bar:
            while True:
                validating = self.val_set is not None and schedule.validation_due()
                saving = validating or stopping or schedule.epoch_ended()
                if saving or schedule.checkpoint_due(saved_at):
                    stopping |= self.train_step.wait()
                    self._save()
                    saved_at = time.monotonic()
                if stopping and not schedule.ended:
                    raise self._interrupted()
                if self.val_set is not None and validating:
                    # The state is being saved, so a signal may interrupt the validation.
                    with stop.raise_immediately(self._interrupted):
                        # Rank 0 scores the predictions while training continues.
                        predictions = predict_split(
                            state.evaluation_model().predict,
                            self.val_set,
                            self.config,
                            self.world,
                            task="validate",
                            tile=(self.config.data.tile, self.config.data.tile_overlap),
                        )
                        state.detector.train()
                        schedule.mark_validated()
                        if self.recorder:
                            self.recorder.score(self.val_set.annotations, predictions)
                if schedule.ended or self._out_of_patience():
                    break
                step_sums, stopping = self.train_step(
                    [next(batches) for _ in range(self.loader.pass_count)], stop=stop.requested
                )
                self.sums += step_sums
                self.summed += 1
                schedule.advance()
                self.loader.start_plain_epochs(schedule.first_plain_epoch())
                bar.total = schedule.expected_steps
                if state.step % self.config.train.log_every == 0 or schedule.ended:
                    stopping |= self.train_step.wait()
                    bar.metrics = self._report(time.monotonic() - start, state.step - first)
                    bar.note = describe_metrics(bar.metrics)
                bar.update()
        return self._finish(time.monotonic() - start, state.step - first)

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"training stopped after step {self.state.step} of {self.schedule.expected_steps}; "
            f"its state is in {self.checkpoints}",
            fix="run the same command again to resume it",
        )

    def _out_of_patience(self) -> bool:
        """Return whether `train.patience` ends training; wait for the score of the last validation."""
        patience, state, epoch = self.config.train.patience, self.state, self.schedule.epoch
        if not patience or state.validated < state.step:
            return False
        self.wait_for_writes()
        best = self.recorder.best if self.recorder else None
        self.ended_early = broadcast(best is not None and epoch - best.epoch >= patience, self.world)
        if self.ended_early and best:
            _LOG.info(
                "no better %s since epoch %d: stopping after epoch %d of %d (train.patience=%d)",
                self.config.evaluation.metric,
                best.epoch,
                epoch,
                self.config.train.epochs,
                patience,
            )
        return self.ended_early

    def _report(self, seconds: float, steps: int) -> dict[str, float]:
        """Log means over all ranks since the last report; return the metrics for the progress bar."""
        state = self.state
        total, *losses, norm = (
            all_reduce_sum(self.sums, self.world) / self.world.size / self.summed
        ).tolist()
        self.sums.zero_()
        self.summed = 0
        rate = steps * self.global_batch / seconds
        if self.log and self.recorder:
            named = zip(state.detector.loss_names, losses, strict=True)
            row = {
                "step": state.step,
                "epoch": state.samples / len(self.train_set),
                "loss": total,
                **{f"loss_{name}": value for name, value in named},
                "gradient_norm": norm,
                "lr": max(group["lr"] for group in state.optimizer.param_groups),
                "images_per_second": rate,
            }
            self.log.add("train", row)
            self.recorder.raise_failure()
        return {job_status.LOSS: total, job_status.SPEED: rate}

    def _save(self) -> None:
        """Save the state in the background while training continues."""
        state = {
            "config": parsing.to_json(self.config),
            "categories": self.train_set.categories,
            "fingerprint": self.train_set.fingerprint,
            "global_batch": self.global_batch,
            "epoch": self.schedule.epoch,
            "seconds": self.schedule.seconds,
            **self.state.state_dict(),
        }
        if self.recorder:
            self.recorder.save(state)

    def _finish(self, seconds: float, steps: int) -> dict[str, Any]:
        self.wait_for_writes()
        if self.recorder and not self.recorder.best:
            # Without a validation split, the last weights count as the best.
            self.recorder.write_last_as_best()
            self.wait_for_writes()
        best = self.recorder.best if self.recorder else None
        metrics = best.metrics if best else {}
        result: dict[str, Any] = {
            "checkpoint": storage.join(self.output, checkpoint.BEST),
            "metric": self.config.evaluation.metric,
            "metrics": metrics,
            "best_step": best.step if best else None,
            "steps": self.state.step,
            "epochs": self.schedule.epoch,
            "ended_early": self.ended_early,
            "seconds": seconds,
            "images_per_second": steps * self.global_batch / seconds if steps else 0.0,
            "resumed_from": self.resumed_from,
            "processes": self.world.size,
        }
        if self.log:
            self.log.publish()
            storage.write_json(storage.join(self.output, "result.json"), result)
            best_metrics = {f"best/{name.removeprefix('coco/')}": v for name, v in metrics.items()}
            self.tracking.finish("finished", {"checkpoint": result["checkpoint"], **best_metrics})
        # The controller stops an elastic job's pods after the first one succeeds, so all wait for rank 0.
        broadcast(None, self.world)
        return result

    def wait_for_writes(self) -> None:
        """Wait until everything is written; raises the first failure."""
        if self.recorder:
            self.recorder.wait()

    def close(self) -> None:
        """End threads and close files."""
        self.loader.close()
        if self.recorder and self.log:
            self.recorder.close()
            self.log.close()


def newest_checkpoint(folder: str, world: World) -> checkpoint.State | None:
    """Read the newest checkpoint of a run, the same on every rank; return None if there is none.

    Rank 0 chooses it, because machines may see different contents of a shared folder for a minute.
    """
    newest = checkpoint.read_latest(folder) if world.is_main else None
    step = broadcast(newest["step"] if newest else None, world)
    return checkpoint.read_step(folder, step) if step is not None and newest is None else newest


def choose_global_batch(config: Config, saved: checkpoint.State | None, samples: int, world: World) -> int:
    """Return the global batch: that of the checkpoint, unless the batch options changed."""
    train = config.train
    configured = train.global_batch
    if not configured and saved:
        before = parsing.from_json(saved["config"], where="the checkpoint's configuration").train
        configured = saved["global_batch"] if before.batch_size == train.batch_size else 0
    return global_batch_size(
        samples, batch_size=train.batch_size, processes=world.size, configured=configured
    )


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Format loss and speed for the progress bar."""
    return f"loss {metrics[job_status.LOSS]:.3f}, {metrics[job_status.SPEED]:.0f} images/s"
