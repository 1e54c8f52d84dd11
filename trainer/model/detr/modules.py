"""Network modules that differ from those of transformers, and weight initialization."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.models.d_fine.modeling_d_fine import DFineIntegral
from transformers.models.hgnet_v2.modeling_hgnet_v2 import HGNetV2LearnableAffineBlock

from trainer.model.batchnorm_folding import convert_convolution
from trainer.model.detr.criterion import at_least_fp32

INITIAL_LOGIT = -math.log(1 / 0.01 - 1)
"""Initial logit of every class: a score of 0.01 (Lin et al. 2017)."""
_INITIALIZED_BY_TRANSFORMERS = ("sampling_offsets", "attention_weights", "gate", "value_proj", "output_proj")
"""Layers that transformers initializes like the authors."""
_ZERO_HEADS = re.compile(r"enc_bbox_head|decoder\.(pre_bbox_head|bbox_embed\.\d+|lqe_layers\.\d+\.reg_conf)")
"""Heads whose last layer starts at zero, so that boxes and scores do not change at first."""
_CLASS_HEADS = re.compile(r"enc_score_head|decoder\.class_embed\.\d+")
XAVIER = r"decoder\.(layers\.\d+\.mlp\..*|query_pos_head\.layers\.\d+)|enc_output\.0"
"""Layers that are initialized as in Glorot and Bengio 2010."""


def to_python_ints(shapes: Sequence[tuple[int, int]]) -> Any:
    """Convert shapes to Python integers, whose comparisons neither wait for the device nor are exported."""
    return np.array(shapes, dtype=object)


def replace_modules(root: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Replace each module of class `kind` by `make(module)`."""
    for name, module in list(root.named_modules()):
        if isinstance(module, kind):
            root.set_submodule(name, make(module))


class ExportableMaxPool(nn.Module):
    """Equals nn.MaxPool2d(2, stride=1), without the ONNX operator MaxPool.

    ONNX Runtime 1.31 merges zero padding into MaxPool, which pads with minus infinity instead. This would
    change negative values at the right and lower edges of HGNetV2's stem.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(x[..., :-1, :], x[..., 1:, :])
        return torch.maximum(x[..., :-1], x[..., 1:])


class AffineBlock(HGNetV2LearnableAffineBlock):
    """A scale and a shift for all channels, in the type of the input.

    Without the cast, fp32 parameters would convert 16-bit inputs to fp32, and the next convolution would cast
    them back.
    """

    def __init__(self, part: HGNetV2LearnableAffineBlock) -> None:
        super().__init__()
        self.scale, self.bias = part.scale, part.bias

    def forward(self, hidden_state: Tensor) -> Tensor:
        scale, shift = self.scale.to(hidden_state.dtype), self.bias.to(hidden_state.dtype)
        # A single operation rounds only once.
        return torch.addcmul(shift, hidden_state, scale)


class Fp32Integral(DFineIntegral):
    """Computes mean distances in fp32, because bf16 would reduce the precision of boxes to eight bits."""

    def forward(self, pred_corners: Tensor, project: Tensor) -> Tensor:
        with torch.autocast(pred_corners.device.type, enabled=False):
            return super().forward(at_least_fp32(pred_corners), project)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution that uses fp32 on a CPU, where bf16 gradients take 20 times as long."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor
        if input.device.type != "cpu":
            output = super()._conv_forward(input, weight, bias)
            return output
        with torch.autocast("cpu", enabled=False):
            shift = None if bias is None else at_least_fp32(bias)
            output = super()._conv_forward(at_least_fp32(input), at_least_fp32(weight), shift)
            return output.to(input.dtype)


def find_autocast_layers(model: nn.Module, without: nn.Module | None = None) -> list[nn.Module]:
    """Return the linear layers and convolutions that use autocast's type, except those inside `without`."""
    excluded = set(without.modules()) if without else set()
    kinds = (nn.Linear, nn.Conv2d)
    modules = [part for part in model.modules() if isinstance(part, kinds) and part not in excluded]
    return [part for part in modules if not isinstance(part, DepthwiseConv2d)]


def use_fast_dtype_modules(model: nn.Module) -> None:
    """Make affine blocks and strided depthwise convolutions compute in the fastest types, in place.

    Weight names do not change.
    """
    replace_modules(model, HGNetV2LearnableAffineBlock, AffineBlock)

    def convert(convolution: nn.Conv2d) -> nn.Conv2d:
        strided = convolution.groups > 1 and max(convolution.stride) > 1
        return convert_convolution(convolution, DepthwiseConv2d) if strided else convolution

    replace_modules(model, nn.Conv2d, convert)


@torch.no_grad()
def initialize_weights(model: nn.Module, backbone: nn.Module, xavier: str = XAVIER) -> None:
    """Initialize encoder and decoder as the authors of D-FINE and RT-DETR do, in place.

    transformers initializes nearly all weights with a standard deviation of 0.01, so only a ten-thousandth of
    a gradient passes through three layers. Source: `_reset_parameters` in src/zoo/dfine/dfine_decoder.py of
    github.com/Peterande/D-FINE (0eb0cfe) and in rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of
    github.com/lyuwenyu/RT-DETR (366ce51), with PyTorch's defaults for the rest.
    """
    excluded = set(backbone.modules())
    modules = {name: module for name, module in model.named_modules() if module not in excluded}
    initialize_layers(modules, xavier)
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and _CLASS_HEADS.fullmatch(name):
            nn.init.constant_(module.bias, INITIAL_LOGIT)
        layers = getattr(module, "layers", None)
        if _ZERO_HEADS.fullmatch(name) and isinstance(layers, nn.ModuleList):
            for values in layers[-1].parameters():
                nn.init.zeros_(values)


def initialize_layers(modules: Mapping[str, nn.Module], xavier: str) -> None:
    """Initialize layers with PyTorch's defaults, or with Xavier initialization if a name matches `xavier`."""
    for name, module in modules.items():
        if name.endswith(_INITIALIZED_BY_TRANSFORMERS):
            continue
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, _BatchNorm)):
            module.reset_parameters()
        attention = name.endswith(("q_proj", "k_proj", "v_proj"))
        if attention or (isinstance(module, (nn.Linear, nn.Conv2d)) and re.fullmatch(xavier, name)):
            # In PyTorch's attention, query, key and value are one matrix.
            nn.init.xavier_uniform_(module.get_parameter("weight"), gain=1 / math.sqrt(2) if attention else 1)
        if attention or name.endswith("o_proj"):
            nn.init.zeros_(module.get_parameter("bias"))
