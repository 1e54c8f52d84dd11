"""What the processes of a run have in common."""

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import ConfigError
from trainer.launching.distributed import SINGLE, World
from trainer.training.state import TrainState


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
def test_running_statistics_are_rank_0s_once_they_are_read(tiny, tmp_path):
    config = tiny(train__ema_decay=0.9, train__compile="off")
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    multiprocessing.start_processes(
        process, (config, str(tmp_path), results), nprocs=2, start_method="forkserver"
    )
    by_rank = {rank: (before, after) for rank, before, after in (results.get() for _ in range(2))}
    # They were 1 and 2; of a step's own statistics a tenth comes in.
    assert by_rank[1][0] - by_rank[0][0] > 0.5, "no buffer is sent in a step"
    assert by_rank[0][1] == by_rank[1][1]


def test_synchronized_batchnorm_has_no_effect_with_one_process(tiny, caplog):
    TrainState(tiny(model__sync_batchnorm=True), 3, SINGLE)
    assert "model.sync_batchnorm has no effect" in caplog.text


def test_synchronized_batchnorm_on_several_cpus_is_refused(tiny):
    with pytest.raises(ConfigError, match="sync_batchnorm needs GPUs"):
        TrainState(tiny(model__sync_batchnorm=True), 3, World(0, 2, torch.device("cpu")))
