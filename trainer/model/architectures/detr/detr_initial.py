"""The first weights of encoder and decoder, as the authors of D-FINE and RT-DETR draw them.

transformers draws nearly all of them with a deviation of 0.01, and of RT-DETRv2 the factors of the encoder's
BatchNorm too: right for what published weights replace, but where they are trained, three such layers in
a row pass on a ten-thousandth of a gradient. The authors': `_reset_parameters` in
src/zoo/dfine/dfine_decoder.py of github.com/Peterande/D-FINE (0eb0cfe) and in
rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of github.com/lyuwenyu/RT-DETR (366ce51), and PyTorch's
own where these say nothing.
"""

import math
import re

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

_CHANCE = 0.01
"""Score of every class before anything is learnt (Lin et al. 2017), however many classes there are."""
_AS_IT_IS = ("sampling_offsets", "attention_weights", "gate", "value_proj", "output_proj")
"""Layers that transformers draws as the authors do."""
_BOXES = re.compile(r"(enc_bbox_head|pre_bbox_head|bbox_embed\.\d+|lqe_layers\.\d+\.reg_conf)")
"""Heads that at first leave boxes and scores as they are: their last layer is nothing."""
_CLASSES = re.compile(r"(enc_score_head|class_embed\.\d+)")
_EVEN = re.compile(r"(layers\.\d+\.mlp\..*|query_pos_head\.layers\.\d+|enc_output\.0)")
"""Layers whose outputs vary as much as their inputs (Glorot and Bengio 2010)."""
_EVEN_OF_RTDETR = re.compile(r"decoder_input_proj\.\d+\.0")
"""Further ones: D-FINE's authors leave them to PyTorch."""


@torch.no_grad()
def draw_first_weights(model: PreTrainedModel) -> None:
    """Draw the weights of everything but the backbone, in place.

    Args:
        model: transformers' DFineModel or RTDetrV2Model.
    """
    is_rtdetr = model.config.model_type.startswith("rt_detr")
    modules = {name: module for name, module in model.named_modules() if not name.startswith("backbone")}
    for name, module in modules.items():
        if name.endswith(_AS_IT_IS):
            continue
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding, _BatchNorm)):
            module.reset_parameters()
        if isinstance(module, nn.Linear):
            _draw_linear(name.removeprefix("decoder."), module)
        elif isinstance(module, nn.Conv2d) and is_rtdetr and _EVEN_OF_RTDETR.fullmatch(name):
            nn.init.xavier_uniform_(module.weight)
    for name, module in modules.items():
        layers = getattr(module, "layers", None)
        if _BOXES.fullmatch(name.removeprefix("decoder.")) and isinstance(layers, nn.ModuleList):
            for values in layers[-1].parameters():
                nn.init.zeros_(values)


def _draw_linear(name: str, layer: nn.Linear) -> None:
    if name.endswith(("q_proj", "k_proj", "v_proj")):
        # As in PyTorch's attention, where the three are one matrix.
        nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2))
    elif _EVEN.fullmatch(name):
        nn.init.xavier_uniform_(layer.weight)
    if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
        nn.init.zeros_(layer.bias)
    if _CLASSES.fullmatch(name):
        nn.init.constant_(layer.bias, -math.log(1 / _CHANCE - 1))
