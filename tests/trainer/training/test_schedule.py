"""When a training saves and validates, what it resumes from, and its advice."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from trainer.base.errors import ConfigError, StorageError
from trainer.config.parsing import to_json
from trainer.config.schema import Config, TrainConfig
from trainer.launching.distributed import SINGLE, World
from trainer.training import checkpoint, loop
from trainer.training.loop import CheckpointSchedule, train_longer
from trainer.training.state import TrainState
from trainer.training.time_limit import SplitSizes, TimeLimit

IMAGES, BATCH = 10, 4
SECOND = World(rank=1, size=2, device=torch.device("cpu"))


def after(step, *, validated=0, **options):
    """The schedule of two and a half steps an epoch, after so many steps."""
    config = dataclasses.replace(TrainConfig(epochs=3), **options)
    state = SimpleNamespace(step=step, samples=step * BATCH, validated=validated, world=SINGLE)
    limit = TimeLimit(Config(train=config), SplitSizes(IMAGES), BATCH)
    return CheckpointSchedule(config, state, limit)


def steps_where(method, **options):
    return [step for step in range(9) if getattr(after(step, **options), method)()]


def test_epochs_validations_and_kept_weights():
    assert [after(step).epoch for step in range(9)] == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    assert steps_where("epoch_ended") == [3, 5, 8]
    assert steps_where("validation_due") == [3, 5, 8]
    assert steps_where("validation_due", validate_every=2) == [5, 8]
    assert steps_where("validation_due", validated=5) == [8], "a step is validated once"
    assert steps_where("keeps_weights") == []
    assert steps_where("keeps_weights", keep_every=1) == [3, 5, 8]
    assert steps_where("keeps_weights", keep_every=2) == [5]


def test_checkpoints_within_an_epoch():
    now = time.monotonic()
    assert after(4, checkpoint_steps=2).checkpoint_due(now)
    assert not after(5, checkpoint_steps=2).checkpoint_due(now)
    assert not after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now)
    assert after(4, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601)
    assert not after(5, checkpoint_minutes=10, log_every=4).checkpoint_due(now - 601), "it costs a message"
    assert not after(4, checkpoint_minutes=0, log_every=4).checkpoint_due(now - 601)


def test_every_rank_reads_the_checkpoint_of_rank_0(tmp_path, monkeypatch):
    for step in (6, 9):
        state = {"step": step, "model": {}, "global_batch": 8, "config": "{}"}
        checkpoint.write_step(state, str(tmp_path), step, keep=2)
    assert loop.newest_checkpoint(str(tmp_path), SINGLE)["step"] == 9
    # This machine already sees a newer file than rank 0.
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 6)
    assert loop.newest_checkpoint(str(tmp_path), SECOND)["step"] == 6
    monkeypatch.setattr(loop, "broadcast", lambda value, world: None)
    assert loop.newest_checkpoint(str(tmp_path), SECOND) is None
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 12)
    with pytest.raises(StorageError, match=r"step-00000012\.pt"):
        loop.newest_checkpoint(str(tmp_path), SECOND)


def test_a_folder_that_cannot_be_listed_does_not_start_a_new_run():
    with pytest.raises(StorageError):
        loop.newest_checkpoint("https://127.0.0.1:1/run", SINGLE)


def test_the_global_batch_is_kept_on_other_processes(tiny):
    config = tiny(train__batch_size=4)
    saved = {"config": to_json(config), "global_batch": 8}
    assert loop.step_size(config, None, 24, SINGLE) == 4
    assert loop.step_size(config, saved, 24, SINGLE) == 8
    assert loop.step_size(tiny(train__batch_size=3), saved, 24, SINGLE) == 3, "the user set another"
    assert loop.step_size(tiny(train__global_batch=6), saved, 24, SINGLE) == 6
    with pytest.raises(ConfigError, match="1 images cannot be split among 2 processes"):
        loop.step_size(tiny(train__global_batch=1), saved, 24, SECOND)


def test_an_additional_rank_has_other_random_numbers(tiny):
    before = TrainState(tiny(), 2, SINGLE)
    before.step, before.samples = 5, 40
    saved = before.state_dict()
    torch.manual_seed(1)
    known = TrainState(tiny(), 2, SINGLE)
    known.load_state_dict(saved)
    assert known.samples == 40 and torch.equal(torch.get_rng_state(), saved["random"][0]["cpu"])

    def numbers(rank, step=5):
        state = TrainState(tiny(), 2, World(rank, 4, torch.device("cpu")))
        state.load_state_dict({**saved, "step": step})
        return torch.rand(8)

    assert torch.equal(numbers(1), numbers(1)), "reproducible"
    drawn = [numbers(1), numbers(2), numbers(1, step=6)]
    fresh = torch.rand(8, generator=torch.Generator().manual_seed(tiny().train.seed + 2))
    assert not any(torch.equal(one, fresh) for one in drawn)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_sums_of_a_row_keep_their_mean_on_other_processes(tiny):
    saved = TrainState(tiny(), 2, SINGLE).state_dict()
    length = len(saved["sums"][0])
    saved |= {"sums": [torch.arange(length) + 1.0, torch.arange(length) + 3.0], "summed": 4}

    def sums(rank, size):
        state = TrainState(tiny(), 2, World(rank, size, torch.device("cpu")))
        state.load_state_dict(saved)
        assert state.summed == 4
        return state.sums

    TrainState(tiny(), 2, SINGLE).load_state_dict({k: v for k, v in saved.items() if not k.startswith("sum")})
    assert [sums(rank, 2)[0].item() for rank in (0, 1)] == [1.0, 3.0]
    assert [sums(rank, 3)[0].item() for rank in (0, 1, 2)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("scores", "advised"),
    [((0.2, 0.41, 0.4, 0.46), True), ((), False), ((0.1,), False), ((0.5, 0.51), False), ((0.6, 0.5), False)],
)
def test_longer_training_is_advised_while_the_score_rises(scores, advised):
    rows = [{"kind": "train", "step": 1}, *({"kind": "val", "coco/AP50": score} for score in scores)]
    advice = train_longer(rows, "train.epochs=90")
    assert bool(advice) == ("--set train.epochs=90" in advice) == advised
