"""The libraries' own steps, which ours are compared with."""

import pytest
import torch

from benchmarks import common, stock_step
from trainer.base.errors import ConfigError
from trainer.model.architectures.detr.detr_options import DFineOptions, RTDetrOptions
from trainer.model.architectures.fcos.fcos_options import FcosOptions
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions

CPU = torch.device("cpu")


class Small(torch.nn.Module):
    """Stands for torchvision's model: it takes what that takes, and gives two losses."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.dtypes, self.gradients = [], []
        self.conv.weight.register_post_accumulate_grad_hook(
            lambda one: self.gradients.append(one.grad.norm())
        )

    def forward(self, images, targets):
        assert len(images) == len(targets) == 2 and 0.9 < images[0].max() <= 1
        out = self.conv(torch.stack(images))
        self.dtypes.append(out.dtype)
        return {"one": out.float().square().mean(), "other": out.float().mean()}


@pytest.mark.parametrize(
    ("dtype", "channels_last", "scale"),
    [(None, False, 1), (torch.bfloat16, True, 1), (torch.float16, False, 65536)],
)
def test_torchvisions_steps_are_its_reference_scripts(dtype, channels_last, scale, monkeypatch):
    """fp16 goes with a gradient scaler, and keeps the layout as it comes."""
    model = Small()
    monkeypatch.setattr(stock_step, "stock_model", lambda *_: model)
    candidate = stock_step.stock(common.random_batch(2, 32, 3, CPU), RetinaNetOptions(), 3, dtype)
    candidate.forward().backward()
    model.zero_grad()
    before = model.conv.weight.detach().clone()
    candidate.step()
    assert model.dtypes == [dtype or torch.float32] * 2
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert model.gradients[1] / model.gradients[0] == pytest.approx(scale, rel=0.05)
    moved = (model.conv.weight - before).norm()
    assert model.conv.weight.grad is None
    assert 0 < moved < 1e-4, "the optimiser takes gradients without the scale"


@pytest.fixture
def networks(monkeypatch):
    """The networks that `stock_step.build` makes, whose library's network is trained."""
    pytest.importorskip("transformers")
    built = []
    real = stock_step.build
    monkeypatch.setattr(stock_step, "build", lambda *options: built.append(real(*options)) or built[-1])
    return built


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        DFineOptions(size="n", width=0.25, queries=20, denoising=10, frozen_stem=True, frozen_norm=True),
        RTDetrOptions(size="r18", width=0.25, queries=20, denoising=10),
    ],
)
def test_transformers_steps_train_its_network(options, dtype, networks, monkeypatch):
    trained = []
    real = torch.optim.AdamW.__init__
    monkeypatch.setattr(
        torch.optim.AdamW, "__init__",
        lambda self, weights, **more: (trained.extend(weights), real(self, weights, **more))[0],
    )  # fmt: skip
    torch.manual_seed(0)
    candidate = stock_step.stock(common.random_batch(2, 64, 3, CPU), options, 3, dtype)
    before = [weight.detach().clone() for weight in trained]
    assert candidate.forward().isfinite()
    candidate.step()
    assert any(not torch.equal(weight, old) for weight, old in zip(trained, before, strict=True))
    assert all(weight.grad is None for weight in trained)
    ours = sum(weight.numel() for weight in networks[0].parameters() if weight.requires_grad)
    assert sum(weight.numel() for weight in trained) == ours


def test_what_no_library_has_is_told():
    with pytest.raises(ConfigError, match="compare fcos with"):
        stock_step.stock(common.random_batch(2, 64, 3, CPU), FcosOptions(), 3, None)
