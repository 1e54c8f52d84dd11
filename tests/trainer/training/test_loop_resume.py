"""Going on from a checkpoint on other processes than before."""

import pytest
import torch

from trainer.base.errors import ConfigError, StorageError
from trainer.config.parsing import to_json
from trainer.launching.distributed import SINGLE, World
from trainer.training import checkpoint, loop
from trainer.training.state import TrainState

SECOND = World(rank=1, size=2, device=torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    for step in (6, 9):
        state = {"step": step, "model": {}, "global_batch": 8, "config": "{}"}
        checkpoint.write_step(state, str(tmp_path), step, keep=2)
    return str(tmp_path)


def test_every_rank_reads_what_rank_0_found(folder, monkeypatch):
    assert loop.newest_checkpoint(folder, SINGLE)["step"] == 9
    # This machine already shows a newer file than rank 0's.
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 6)
    assert loop.newest_checkpoint(folder, SECOND)["step"] == 6
    monkeypatch.setattr(loop, "broadcast", lambda value, world: None)
    assert loop.newest_checkpoint(folder, SECOND) is None


def test_a_rank_that_does_not_see_the_folder_says_so(folder, monkeypatch):
    monkeypatch.setattr(loop, "broadcast", lambda value, world: 12)
    with pytest.raises(StorageError, match=r"step-00000012\.pt"):
        loop.newest_checkpoint(folder, SECOND)


def test_a_folder_that_cannot_be_listed_is_no_reason_to_start_anew():
    with pytest.raises(StorageError):
        loop.newest_checkpoint("https://127.0.0.1:1/run", SINGLE)


def test_the_global_batch_is_kept_where_only_the_processes_differ(tiny):
    config = tiny(train__batch_size=4)
    saved = {"config": to_json(config), "global_batch": 8}
    assert loop.step_size(config, None, 24, SINGLE) == 4
    assert loop.step_size(config, saved, 24, SINGLE) == 8
    assert loop.step_size(tiny(train__batch_size=3), saved, 24, SINGLE) == 3, "the user asks for another"
    assert loop.step_size(tiny(train__global_batch=6), saved, 24, SINGLE) == 6
    with pytest.raises(ConfigError, match="1 images cannot be shared by 2 processes"):
        loop.step_size(tiny(train__global_batch=1), saved, 24, SECOND)


def test_a_rank_that_was_not_there_gets_random_numbers_of_its_own(tiny):
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

    assert torch.equal(numbers(1), numbers(1)), "the same at every try"
    drawn = [numbers(1), numbers(2), numbers(1, step=6)]
    fresh = torch.Generator().manual_seed(tiny().train.seed + 2)
    assert not any(torch.equal(one, torch.rand(8, generator=fresh)) for one in drawn)
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

    assert [sums(rank, 2)[0].item() for rank in (0, 1)] == [1.0, 3.0]
    assert [sums(rank, 3)[0].item() for rank in (0, 1, 2)] == [2.0, 2.0, 2.0]
