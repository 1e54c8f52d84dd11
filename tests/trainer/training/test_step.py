"""The guard of a step, and gradients sent in bf16."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.base.errors import ConfigError
from trainer.launching.distributed import SINGLE
from trainer.training.step import StepGuard, compress_gradients


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_step_does_not_change_weights_and_optimiser(kind, bad):
    parameter = torch.ones(3, requires_grad=True)
    optimizer = kind([parameter], lr=0.1, fused=True)
    guard = StepGuard(optimizer, SINGLE)
    history = []
    for number, loss in enumerate([1.0, bad, 2.0]):
        parameter.grad = torch.full((3,), loss)
        result = guard.check(number, torch.tensor([loss, 0.5]), [number, 7], stopping=number == 2)
        optimizer.step()
        state = optimizer.state[parameter]
        history.append((parameter.detach().clone(), copy.deepcopy(state)))
        assert result is None or (result.step, result.broken) == (number - 1, number == 2)
    assert result.image_ids == [1, 7] and not result.stopping and result.losses[1] == 0.5
    last = guard.settle()
    assert (last.step, last.broken, last.stopping) == (2, False, True)
    assert guard.settle() is None
    first, second, third = history
    assert torch.equal(first[0], second[0]) and not torch.equal(second[0], third[0])
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items() if value is not None)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_torch_that_cannot_send_bf16_is_named(group, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"train\.gradient_compression: torch .* cannot send bf16"):
        compress_gradients(DistributedDataParallel(nn.Linear(3, 1)))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without NCCL cannot")
def test_gradients_are_sent_in_bf16(group):
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    compress_gradients(model)
    model(torch.full((1, 3), 1 + 2**-12)).sum().backward()  # not a number of bf16
    assert (model.module.weight.grad == 1).all()
