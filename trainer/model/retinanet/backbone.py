"""torchvision's residual networks of any width with a feature pyramid, in torchvision's state-dict layout."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.model.batchnorm_folding import TORCHVISION_PAIRS, apply_in_convolutions
from trainer.model.retinanet.options import RetinaNetOptions

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
_STAGES = (3, 4, 5)
"""Backbone stages that the pyramid uses: C3 to C5."""


def build_backbone(config: RetinaNetOptions) -> BackboneWithFPN:
    """Build backbone and pyramid: [B, 3, H, W] to an ordered dict of P3 to P7, [B, fpn_channels, h, w]."""
    block, layers, groups, group_width = _DEPTHS[config.backbone]
    norms: dict[str, NormLayer] = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "group": group_norm}
    body = _NarrowResNet(
        config.backbone_width, norms[config.norm], block, layers, groups=groups, width_per_group=group_width
    )
    freeze(body, config.trainable_layers)
    apply_in_convolutions(body, (FrozenBatchNorm2d,), TORCHVISION_PAIRS)
    channels = [config.backbone_width * block.expansion * 2 ** (stage - 2) for stage in _STAGES]
    return BackboneWithFPN(
        body,
        return_layers={f"layer{stage - 1}": str(index) for index, stage in enumerate(_STAGES)},
        in_channels_list=channels,
        out_channels=config.fpn_channels,
        extra_blocks=_coarser_levels(config.version, channels[-1], config.fpn_channels),
    )


def _coarser_levels(version: str, channels: int, width: int) -> LastLevelP6P7:
    """Build P6 and P7, which start from C5 in version 2 and from P5 in version 1."""
    levels = LastLevelP6P7(channels if version == "v2" else width, width)
    levels.use_P5 = version == "v1"  # Otherwise torchvision infers it from the widths.
    return levels


def freeze(body: ResNet, trainable_layers: int) -> None:
    """Freeze all but the last `trainable_layers` of the five stages."""
    trained = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable_layers]
    for name, parameter in body.named_parameters():
        stage = name.split(".")[0].replace("bn1", "conv1")
        if stage not in trained:
            parameter.requires_grad_(False)


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm with 8 channels per group and at most 32 groups, as in the published width."""
    return nn.GroupNorm(max(1, min(32, channels // 8)), channels)


class _NarrowResNet(ResNet):  # type: ignore[misc]
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
        width = planes * self.width // _PUBLISHED_WIDTH
        layer: nn.Sequential = super()._make_layer(block, width, *args, **kwargs)
        return layer
