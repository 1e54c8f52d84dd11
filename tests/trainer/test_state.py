"""What the processes of a run have in common."""

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import World
from trainer.state import TrainState


def means(state):
    return [buffer for name, buffer in state.evaluated().named_buffers() if name.endswith("running_mean")]


def process(rank, config, folder, results):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    state = TrainState(config, 3, World(rank, 2, torch.device("cpu")))
    model = state.distributed()
    assert isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    for value in means(state):
        value.fill_(rank + 1.0)
    with torch.no_grad():  # in training mode: this may not send them
        model.train()(
            torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8),
            torch.zeros(1, 1, 4),
            torch.zeros(1, 1).long(),
        )
    before = means(state)[-1].mean().item()
    state.share_buffers()
    results.put((rank, before, [value.mean().item() for value in means(state)]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_running_statistics_are_rank_0s_once_they_are_read(average, tiny, tmp_path):
    config = tiny(train__ema_decay=average, train__compile="off")
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(process, (config, str(tmp_path), results), nprocs=2)
    found = {rank: (before, after) for rank, before, after in (results.get() for _ in range(2))}
    # They were 1 and 2; of a step's own statistics a tenth comes in.
    assert found[1][0] - found[0][0] > 0.5, "no buffer is sent in a step"
    assert found[0][1] == found[1][1]
