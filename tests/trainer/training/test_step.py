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


def optimizers(parameter):
    yield torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    yield torch.optim.Adam([parameter], lr=0.1, fused=True)
    yield torch.optim.AdamW([parameter], lr=0.1, fused=True)


@pytest.mark.parametrize("kind", range(3), ids=["sgd", "adam", "adamw"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_step_leaves_the_weights_and_the_optimiser_alone(kind, bad):
    parameter = torch.ones(3, requires_grad=True)
    optimizer = list(optimizers(parameter))[kind]
    guard = StepGuard(optimizer, SINGLE)
    history = []
    for number, loss in enumerate([1.0, bad, 2.0]):
        parameter.grad = torch.full((3,), loss)
        verdict = guard.judge(number, torch.tensor([loss, 0.5]), [number, 7], stopping=number == 2)
        optimizer.step()
        state = optimizer.state[parameter]
        history.append((parameter.detach().clone(), copy.deepcopy(state)))
        assert verdict is None or (verdict.step, verdict.broken) == (number - 1, number == 2)
    assert verdict.image_ids == [1, 7] and not verdict.stopping and verdict.losses[1] == 0.5
    last = guard.settle()
    assert (last.step, last.broken, last.stopping) == (2, False, True)
    assert guard.settle() is None
    first, second, third = history
    assert torch.equal(first[0], second[0]) and not torch.equal(second[0], third[0])
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items() if value is not None)


def test_a_torch_that_cannot_send_bf16_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(
            ConfigError, match=r"train\.gradient_compression: torch .* cannot send bf16"
        ) as caught:
            compress_gradients(DistributedDataParallel(nn.Linear(3, 1)))
        assert "train.gradient_compression=false" in caught.value.fix
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without NCCL cannot")
def test_gradients_are_sent_in_bf16(tmp_path):
    plain = nn.Linear(2, 2)
    compress_gradients(plain)  # one process has nobody to send to
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        compress_gradients(model)
        value = 1 + 2**-12  # not a number of bf16
        model(torch.full((1, 3), value)).sum().backward()
        assert (model.module.weight.grad == 1).all()
    finally:
        dist.destroy_process_group()
