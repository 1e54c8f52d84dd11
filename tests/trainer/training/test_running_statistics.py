"""BatchNorm's running statistics do not depend on how a step's images are divided."""

import pytest
import torch
from steps import run_in_parts
from torch import nn

from trainer.launching.distributed import SINGLE
from trainer.training.running_statistics import RunningStatistics


class Levels(nn.Module):
    """A layer that is called for two levels of each image, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.norm, self.unused = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(2)

    def forward(self, images):
        return self.norm(images), self.norm(images[..., ::2])


@pytest.mark.parametrize(
    ("passes", "compiles"),
    [([8], False), ([4, 4], False), ([1, 5, 2], False), pytest.param([4, 4], True, marks=pytest.mark.slow)],
)
def test_a_step_updates_them_once_by_all_its_images(passes, compiles):
    network, images = Levels(), torch.randn(8, 3, 6, 4) + torch.tensor([100.0, 0.0, -3.0]).view(3, 1, 1)
    statistics = RunningStatistics(network, SINGLE)
    forward = torch.compile(network, backend="eager") if compiles else network
    for step in (1, 2):
        statistics.begin()
        for part in images.split(passes):
            with torch.no_grad():
                network(part * 9)  # a survey
            forward(part)
            statistics.add_pass()
        statistics.update()
        seen = torch.cat([images.flatten(2), images[..., ::2].flatten(2)], dim=2).transpose(0, 1).flatten(1)
        assert network.norm.num_batches_tracked == network.unused.num_batches_tracked == step
        left = 0.7**step
        assert torch.allclose(network.norm.running_mean, (1 - left) * seen.mean(1))
        assert torch.allclose(network.norm.running_var, left + (1 - left) * seen.var(1))
        assert (network.unused.running_mean == 0).all() and (network.unused.running_var == 1).all()


@pytest.mark.slow
def test_every_entry_of_the_state_is_that_of_any_number_of_processes(shards, tiny, tmp_path):
    """Four images a step in passes of two; also resumed on a different number of processes."""
    config = tiny(train__precision="fp32", train__global_batch=4, train__batch_size=2, train__ema_decay=0.9)
    whole, *others = (
        run_in_parts(config, shards, tmp_path / "-".join(map(str, processes)), processes)
        for processes in ((1, 1), (2, 2), (1, 2), (2, 1))
    )
    names = ["model", "ema", "optimizer", "scaler", "step", "samples", "validated"]
    changed = {name for name in whole["model"] if "running" in name}
    assert changed and whole["step"] == 4
    for other in others:
        assert whole.keys() == other.keys()
        for name in names:
            torch.testing.assert_close(other[name], whole[name], rtol=0, atol=0)
