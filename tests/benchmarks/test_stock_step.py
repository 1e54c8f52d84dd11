"""The libraries' own steps, which ours are compared with."""

import pytest
import torch

from benchmarks import common, stock_step
from trainer.base.errors import ConfigError
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


def test_a_detector_without_a_counterpart_is_refused():
    with pytest.raises(ConfigError, match="compare fcos with"):
        stock_step.stock(common.random_batch(2, 64, 3, CPU), FcosOptions(), 3, None)
