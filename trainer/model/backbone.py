"""Residual backbones with a feature pyramid, in torchvision's state-dict layout."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.model.backbone_options import PyramidOptions
from trainer.model.batchnorm_folding import TORCHVISION, apply_in_convolutions

NormLayer = Callable[[int], nn.Module]

_DEPTHS: dict[str, tuple[Any, list[int], int, int]] = {
    # block, blocks of each stage, groups, width of a group
    "resnet18": (BasicBlock, [2, 2, 2, 2], 1, 64),
    "resnet34": (BasicBlock, [3, 4, 6, 3], 1, 64),
    "resnet50": (Bottleneck, [3, 4, 6, 3], 1, 64),
    "resnet101": (Bottleneck, [3, 4, 23, 3], 1, 64),
    "resnext50_32x4d": (Bottleneck, [3, 4, 6, 3], 32, 4),
    "resnext101_32x8d": (Bottleneck, [3, 4, 23, 3], 32, 8),
    "resnext101_64x4d": (Bottleneck, [3, 4, 23, 3], 64, 4),
}
_PUBLISHED_WIDTH = 64


class _WidthResNet(ResNet):
    """torchvision's ResNet with `width` instead of 64 channels in its first stage."""

    def __init__(self, width: int, norm_layer: NormLayer, block: Any, *args: Any, **kwargs: Any) -> None:
        self.width = width
        super().__init__(block, *args, norm_layer=norm_layer, **kwargs)
        if width != _PUBLISHED_WIDTH:
            self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = norm_layer(width)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == _PUBLISHED_WIDTH:
            self.inplanes = self.width
        return super()._make_layer(block, planes * self.width // _PUBLISHED_WIDTH, *args, **kwargs)


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 8 channels a group, at most 32 groups (the published width has 32)."""
    return nn.GroupNorm(max(1, min(32, channels // 8)), channels)


def build_backbone(
    config: PyramidOptions,
    first: int,
    extra: Callable[[int, int], ExtraFPNBlock],
    norm_layer: NormLayer | None = None,
) -> BackboneWithFPN:
    """Build the backbone and its pyramid.

    Args:
        config: which network, how wide, how much of it is trained.
        first: the first stage whose output the pyramid takes, C2 to C5; the last is always C5.
        extra: makes what adds coarser levels, of the channels of C5 and of the pyramid.
        norm_layer: makes the normalisation within the pyramid; None has none.

    Returns:
        A module from [B, 3, H, W] to an ordered dict of [B, fpn_channels, h, w], the finest first.
    """
    block, layers, groups, group_width = _DEPTHS[config.backbone]
    of_body: NormLayer = {
        "batch": nn.BatchNorm2d,
        "frozen": FrozenBatchNorm2d,
        "group": group_norm,
    }[config.norm]
    body = _WidthResNet(
        config.backbone_width, of_body, block, layers, groups=groups, width_per_group=group_width
    )
    freeze(body, config.trainable_layers)
    apply_in_convolutions(body, (FrozenBatchNorm2d,), TORCHVISION)
    stages = range(first, 6)
    channels = [config.backbone_width * block.expansion * 2 ** (stage - 2) for stage in stages]
    return BackboneWithFPN(
        body,
        return_layers={f"layer{stage - 1}": str(place) for place, stage in enumerate(stages)},
        in_channels_list=channels,
        out_channels=config.fpn_channels,
        extra_blocks=extra(channels[-1], config.fpn_channels),
        norm_layer=norm_layer,
    )


def freeze(body: ResNet, trainable_layers: int) -> None:
    """Leave the weights of the first stages as they are, all but the last `trainable_layers` of five."""
    stages = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable_layers]
    if "conv1" in stages:
        stages.append("bn1")
    for name, parameter in body.named_parameters():
        if name.split(".")[0] not in stages:
            parameter.requires_grad_(False)
