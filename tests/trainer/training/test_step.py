"""The guard of a step, and gradients sent in bf16."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import ConfigError
from trainer.launching.distributed import SINGLE
from trainer.training.step import compress_gradients, guard_step


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_step_does_not_change_weights_and_optimiser(kind, bad):
    parameter = torch.ones(3, requires_grad=True)
    optimizer = kind([parameter], lr=0.1, fused=True)
    history, reports = [], []
    for number, loss in enumerate([1.0, bad, 2.0]):
        parameter.grad = torch.full((3,), loss)
        reports.append(guard_step(optimizer, torch.tensor([loss, 0.5]), number == 2, SINGLE))
        optimizer.step()
        history.append((parameter.detach().clone(), copy.deepcopy(optimizer.state[parameter])))
    broken, stopping, losses, others = zip(*(report().tolist() for report in reports), strict=True)
    assert broken == (0, 1, 0) and stopping == (0, 0, 1)
    assert losses[::2] == (1.0, 2.0) and others == (0.5, 0.5, 0.5)
    first, second, third = history
    assert torch.equal(first[0], second[0]) and not torch.equal(second[0], third[0])
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items() if value is not None)


def test_a_torch_that_cannot_send_bf16_is_named(process_group, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"train\.gradient_compression: torch .* cannot send bf16"):
        compress_gradients(DistributedDataParallel(nn.Linear(3, 1)))
