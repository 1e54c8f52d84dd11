"""The published sizes of D-FINE and RT-DETRv2, as keyword arguments of transformers' configurations.

D-FINE: the files `configs/dfine/dfine_hgnetv2_{n,s,m,l,x}_coco.yml` of github.com/Peterande/D-FINE
(4a1f73a, 2025-04-11), of which PPHGNetV2 is B0, B0, B2, B4 and B5. RT-DETRv2: the folder
`rtdetrv2_pytorch/configs/rtdetrv2` of github.com/lyuwenyu/RT-DETR (068dfde). Both are under Apache-2.0.
"""

import re
from typing import Any

STRIDE = 32
"""Pixels of the square for one place of the coarsest level: the square's side is a multiple of it."""
_UNIT = 8
"""Channels of a narrower network are multiples of it; its queries' of four times that, for 8 heads."""

_HGNET: dict[str, dict[str, Any]] = {
    "B0": {
        "stem": [16, 16], "inward": [16, 64, 256, 512], "middle": [16, 32, 64, 128],
        "outward": [64, 256, 512, 1024], "blocks": [1, 1, 2, 1], "layers": 3, "affine": True,
    },
    "B2": {
        "stem": [24, 32], "inward": [32, 96, 384, 768], "middle": [32, 64, 128, 256],
        "outward": [96, 384, 768, 1536], "blocks": [1, 1, 3, 1], "layers": 4, "affine": True,
    },
    "B4": {
        "stem": [32, 48], "inward": [48, 128, 512, 1024], "middle": [48, 96, 192, 384],
        "outward": [128, 512, 1024, 2048], "blocks": [1, 1, 3, 1], "layers": 6, "affine": False,
    },
    "B5": {
        "stem": [32, 64], "inward": [64, 128, 512, 1024], "middle": [64, 128, 256, 512],
        "outward": [128, 512, 1024, 2048], "blocks": [1, 2, 5, 2], "layers": 6, "affine": False,
    },
}  # fmt: skip
"""PPHGNetV2: channels of the stem and of each stage, blocks of each stage, layers of each block, and
whether a learnt scale and shift follows each activation."""

_DFINE: dict[str, dict[str, Any]] = {
    "n": {
        "backbone": "B0", "hidden": 128, "feed_forward": 512, "points": [6, 6], "layers": 3,
        "expansion": 0.34, "depth": 0.5,
    },
    "s": {"backbone": "B0", "layers": 3, "expansion": 0.5, "depth": 0.34},
    "m": {"backbone": "B2", "layers": 4, "depth": 0.67},
    "l": {"backbone": "B4"},
    "x": {"backbone": "B5", "hidden": 384, "encoder_feed_forward": 2048, "scale": 8.0},
}  # fmt: skip
"""Where a size differs from L: width of the queries, width of the layers between, points that a query looks
at on each level, decoder's layers, width and depth of the pyramid's blocks, scale of the distributions."""

_HUB = "hf:"
_NAMES = {"nano": "n", "small": "s", "medium": "m", "large": "l", "xlarge": "x"}
"""Sizes as the hub's names have them."""
_RESNET: dict[str, dict[str, Any]] = {
    "r18": {"depths": [2, 2, 2, 2], "basic": True, "layers": 3, "expansion": 0.5},
    "r34": {"depths": [3, 4, 6, 3], "basic": True, "layers": 4, "expansion": 0.5},
    "r50": {"depths": [3, 4, 6, 3]},
    "r101": {"depths": [3, 4, 23, 3], "hidden": 384, "encoder_feed_forward": 2048},
}
"""RT-DETRv2 on ResNet-vd: blocks of each stage, whether they are basic ones, and as above."""


def dfine(size: str, width: float = 1.0) -> dict[str, Any]:
    """Arguments of transformers' DFineConfig for a published size.

    Args:
        size: n, s, m, l or x.
        width: channels relative to the published ones; other than 1 it is a network of one's own.
    """
    entry = _DFINE[size]
    hgnet = _HGNET[entry["backbone"]]
    points = entry.get("points", [3, 6, 3])
    levels = len(points)
    outward = _scaled(hgnet["outward"], width)
    hidden = _scaled([entry.get("hidden", 256)], width, 4 * _UNIT)[0]
    # Two levels of D-FINE-N, three of the others: the last ones of the backbone.
    return {
        "backbone_config": {
            "model_type": "hgnet_v2",
            "out_indices": [2, 3, 4][-levels:],
            "hidden_sizes": outward,
            "embedding_size": _scaled(hgnet["stem"], width)[-1],
            "stem_channels": [3, *_scaled(hgnet["stem"], width)],
            "stage_in_channels": _scaled(hgnet["inward"], width),
            "stage_mid_channels": _scaled(hgnet["middle"], width),
            "stage_out_channels": outward,
            "stage_num_blocks": hgnet["blocks"],
            "stage_numb_of_layers": [hgnet["layers"]] * 4,
            "use_learnable_affine_block": hgnet["affine"],
        },
        "encoder_in_channels": outward[-levels:],
        "feat_strides": [8, 16, 32][-levels:],
        "encode_proj_layers": [levels - 1],
        "num_feature_levels": levels,
        "decoder_n_points": points,
        "decoder_layers": entry.get("layers", 6),
        "hidden_expansion": entry.get("expansion", 1.0),
        "depth_mult": entry.get("depth", 1.0),
        "reg_scale": entry.get("scale", 4.0),
        # Of X the queries are 256 wide, as of L; what they look at is 384.
        "d_model": min(hidden, 256),
        **_widths(entry, hidden, levels, width),
    }


def rtdetr(size: str, width: float = 1.0) -> dict[str, Any]:
    """Arguments of transformers' RTDetrV2Config for a published size: r18, r34, r50 or r101; see `dfine`."""
    entry = _RESNET[size]
    basic = entry.get("basic", False)
    hidden_sizes = _scaled([64, 128, 256, 512] if basic else [256, 512, 1024, 2048], width)
    hidden = _scaled([entry.get("hidden", 256)], width, 4 * _UNIT)[0]
    return {
        "backbone_config": {
            "model_type": "rt_detr_resnet",
            "out_indices": [2, 3, 4],
            "embedding_size": _scaled([64], width, 2 * _UNIT)[0],
            "hidden_sizes": hidden_sizes,
            "depths": entry["depths"],
            "layer_type": "basic" if basic else "bottleneck",
        },
        "encoder_in_channels": hidden_sizes[1:],
        "hidden_expansion": entry.get("expansion", 1.0),
        "decoder_layers": entry.get("layers", 6),
        "d_model": min(hidden, 256),
        **_widths(entry, hidden, 3, width),
    }


def published_size(uri: str) -> tuple[str, str] | None:
    """Architecture and size of published weights by their name on the hub; None where it tells none."""
    words = re.split(r"[-_/:@]", uri.lower()) if uri.startswith(_HUB) else []
    if "dfine" in words:
        sizes = (_NAMES.get(word, word) for word in words[words.index("dfine") + 1 :])
        return next((("dfine", size) for size in sizes if size in _DFINE), None)
    if "rtdetr" in words:
        sizes = (word.removesuffix("vd") for word in words)
        return next((("rtdetr", size) for size in sizes if size in _RESNET), None)
    return None


def _widths(entry: dict[str, Any], hidden: int, levels: int, width: float) -> dict[str, Any]:
    between = entry.get("feed_forward", 1024)
    return {
        "encoder_hidden_dim": hidden,
        "decoder_in_channels": [hidden] * levels,
        "encoder_ffn_dim": _scaled([entry.get("encoder_feed_forward", between)], width)[0],
        "decoder_ffn_dim": _scaled([between], width)[0],
    }


def _scaled(channels: list[int], width: float, unit: int = _UNIT) -> list[int]:
    """Channels times `width`, in whole units, one at least; as they are where the width is 1."""
    if width == 1:
        return channels
    return [max(unit, round(count * width / unit) * unit) for count in channels]
