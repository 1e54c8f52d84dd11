"""What a batch is of a step's global batch."""

import pytest
import torch

from benchmarks.operators import OperatorCounter
from trainer.data.batch import PADDING, Batch
from trainer.launching.distributed import SINGLE, World
from trainer.model.global_batch import batch_contexts, draw_uniform, random_keys

CPU = torch.device("cpu")


def batch(ids, counts):
    labels = torch.full((len(ids), max(1, *counts)), PADDING)
    for row, count in enumerate(counts):
        labels[row, :count] = 1
    images = torch.zeros(len(ids), 3, 8, 8, dtype=torch.uint8)
    return Batch(images, torch.zeros(*labels.shape, 4), labels, None, ids, [1.0] * len(ids), counts)


def test_targets_are_counted_over_all_batches():
    first, second = batch_contexts([batch([3, 4], [2, 0]), batch([5], [7])], 1, 2, 3, SINGLE)
    assert (first.counts, second.counts) == ([2, 0], [7])
    for part in (first, second):
        assert part.target_count == 9 and part.max_targets == 7 and part.image_count == 3
    assert torch.equal(torch.cat([first.keys, second.keys]), random_keys(1, 2, [3, 4, 5], CPU))


def parts_of_rank(rank, folder, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=2)
    with OperatorCounter() as counted:
        (part,) = batch_contexts([batch([rank], [[2], [7]][rank])], 1, 2, 2, World(rank, 2, CPU))
    results.put((part.counts, part.target_count, part.max_targets, counted.waits))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_targets_are_counted_over_all_processes_without_waiting_for_the_device(tmp_path):
    results = torch.multiprocessing.get_context("forkserver").SimpleQueue()
    torch.multiprocessing.start_processes(
        parts_of_rank, (str(tmp_path), results), nprocs=2, start_method="forkserver"
    )
    assert sorted(results.get() for _ in range(2)) == [([2], 9, 7, 0), ([7], 9, 7, 0)]


def test_keys_differ_by_seed_step_and_image():
    keys = [random_keys(seed, step, [0, 1, 2], CPU) for seed in range(3) for step in range(3)]
    assert len(torch.cat(keys).unique()) == 27


def test_numbers_are_the_same_for_ever():
    """A resumed run, on another machine or release, draws what it drew before."""
    numbers = draw_uniform(random_keys(0, 1, [42], CPU), 3) * 2**24
    assert numbers.tolist() == [[4587760, 1502854, 3861411]]
