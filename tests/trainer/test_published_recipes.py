"""Recipes to published figures have the values of published_recipes.yaml, key by key.

Published values are translated to this program's keys: a backbone's learning rate is relative to the rest's,
the epoch of a drop to all epochs.
"""

import gzip
import inspect
import json
import re
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torchvision.models import detection
from torchvision.transforms import v2

from trainer.config import parsing
from trainer.model import recipes

VALUES = Path(__file__).parent / "published_recipes.yaml"
DIFFERENT = Path(__file__).parent / "published_differences.yaml"
NETWORKS = Path(__file__).parent / "model/detr/authors_networks.json.gz"
FREE = {
    "loader.workers", "loader.prefetch", "train.batch_size",
    "train.compile", "train.seed",
    "train.trackers", "train.log_every", "train.validate_every", "train.checkpoint_steps",
    "train.checkpoint_minutes", "train.keep_checkpoints",
}  # fmt: skip
"""Options that change how a training runs, not what it learns."""


class Difference(NamedTuple):
    """A setting that is not as published: `ours` is empty if it is not an option of this program."""

    recipes: str
    key: str
    published: str
    ours: str
    reason: str


def read_values() -> dict[str, dict[str, str]]:
    """Published values by recipe and key, those that apply."""
    published: dict[str, dict[str, str]] = {}
    for group in yaml.safe_load(VALUES.read_text()):
        common = {
            key: value for of_file in group.get("common", {}).values() for key, value in of_file.items()
        }
        for number, name in enumerate(group["recipes"], 1):
            own = {key: values[number] for key, values in group.get("keys", {}).items()}
            published[name] = {key: value for key, value in {**common, **own}.items() if value != "-"}
    return published


def read_differences() -> list[Difference]:
    return [Difference(*row) for row in yaml.safe_load(DIFFERENT.read_text())]


PUBLISHED, DIFFERENCES = read_values(), read_differences()


def differences_of(name: str) -> list[Difference]:
    return [
        each for each in DIFFERENCES if any(fnmatch(name, pattern) for pattern in each.recipes.split(", "))
    ]


def shown(value: Any) -> str:
    """A value as the docs show it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case []:
            return "none"
        # The draws of `generate_scales(640, draws)` in src/data/dataloader.py of D-FINE.
        case [480, 512, 544, 576, 608, *draws, 672, 704, 736, 768, 800] if set(draws) == {640}:
            return f"640 in {len(draws)} of {len(value)}, else 480-800"
        case [float(), *_]:
            return ", ".join(f"{part:.3g}" for part in value)
        case float():
            return f"{value:g}"
        case [int(), *_]:
            return ", ".join(map(str, value))
    return str(value).rpartition("/")[2] or "none"


def without_effect(ours: dict[str, Any]) -> set[str]:
    """Options that other options disable."""
    colors = ("loader.brightness", "loader.contrast", "loader.saturation", "loader.hue")
    disabled = {
        "loader.fill": ours["loader.resize"] == "squash" and not ours["loader.zoom_out"],
        "loader.scale_draw": ours["loader.scale"] == [1, 1],
        "loader.color_probability": not any(ours[key] for key in colors),
        "loader.repeat_threshold": ours["loader.sampling"] != "repeat_factor",
        "train.lr_scaling": not ours["train.lr_batch"],
        "train.scale_steps": not ours["train.lr_batch"],
        "train.gamma": not ours["train.milestones"],
        "train.warmup_steps": ours["train.warmup_epochs"] > 0,
        "train.warmup_shape": not ours["train.warmup_steps"] and not ours["train.warmup_epochs"],
        "train.ema_ramp": not ours["train.ema_decay"],
        "train.ema_steps": not ours["train.ema_decay"] or ours["train.ema_ramp"] != "exponential",
    }
    return {key for key, off in disabled.items() if off}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_as_published_or_says_why_not(name):
    ours, published = parsing.flatten(asdict(recipes.load(name))), PUBLISHED[name]
    ours["loader.sizes"] = sorted(ours["loader.sizes"])
    changes = {each.key: each.ours for each in differences_of(name) if each.ours}
    assert all(published.get(key) != value for key, value in changes.items())
    for key, value in {**published, **changes}.items():
        assert "." not in key or shown(ours[key]) == value, key
    # No option of the recipe is without a source or a reason.
    reasons = {key for each in differences_of(name) for key in each.key.split(", ")}
    learning = {key for key in ours if key.startswith(("loader.", "model.", "train."))} - FREE
    assert learning - without_effect(ours) <= published.keys() | reasons


def test_the_installed_torchvision_has_the_published_defaults():
    distort, crop = v2.RandomPhotometricDistort(), v2.RandomIoUCrop()
    limits = [
        distort.brightness,
        distort.contrast,
        distort.saturation,
        distort.hue,
        v2.RandomZoomOut().side_range,
    ]
    assert limits == [(0.875, 1.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05), (1.0, 4.0)]
    assert [each.p for each in (distort, v2.RandomZoomOut(), v2.RandomHorizontalFlip())] == [0.5] * 3
    assert (crop.min_scale, crop.max_scale, crop.min_aspect_ratio, crop.max_aspect_ratio) == (0.3, 1, 0.5, 2)
    theirs = inspect.signature(detection.RetinaNet).parameters
    ap = detection.RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1.meta["_metrics"]["COCO-val2017"]["box_map"]
    assert shown(ap) == PUBLISHED["coco_r50"]["AP"]
    assert (theirs["min_size"].default, theirs["max_size"].default) == (800, 1333)
    for key, argument in {
        "model.detections_per_image": "detections_per_img",
        "model.score_threshold": "score_thresh",
        "model.nms_threshold": "nms_thresh",
    }.items():
        assert shown(theirs[argument].default) == PUBLISHED["coco_r50"][key]


_BACKBONE, _REST = "(?=.*backbone)", "(?=.*(?:encoder|decoder))"
_LIKE_S = (
    (f"^{_BACKBONE}(?!.*norm|bn).*$", True, True),
    (f"^{_BACKBONE}(?=.*norm|bn).*$", True, False),
    (f"^{_REST}(?=.*(?:norm|bn|bias)).*$", False, False),
)
_LIKE_L = (
    (f"^{_BACKBONE}(?!.*norm|bn).*$", True, True),
    (f"^{_REST}(?=.*(?:norm|bn)).*$", False, False),
)
OPTIMIZERS = {
    **dict.fromkeys(("dfine_n", "dfine_s", "dfine_m", "dfine_finetune", "rtdetr_r34"), _LIKE_S),
    **dict.fromkeys(("dfine_l", "dfine_x", "rtdetr_r50", "rtdetr_r101"), _LIKE_L),
    "rtdetr_r18": (("^(?=.*(?:norm|bn)).*$", False, False),),
    "deimv2_s": (
        ("^(?=.*.dinov3)(?!.*(?:norm|bn|bias)).*$", True, True),
        ("^(?=.*.dinov3)(?=.*(?:norm|bn|bias)).*$", True, False),
        ("^(?=.*(?:sta|encoder|decoder))(?=.*(?:norm|bn|bias)).*$", False, False),
    ),
}
"""`optimizer.params` of the authors' files: an expression of names, whether the group has the backbone's
learning rate, and whether it decays. That of rtdetr_r50 lacks `|bn`, which no name of its backbone has."""


def rfdetr_group(name: str) -> tuple[float, bool]:
    """Learning rate by main.py and backbone.py of RF-DETR, which counts 13 layers, and whether it decays."""
    if "transformer.decoder" in name:
        return 0.7, True
    if not name.startswith("backbone.0.encoder"):
        return 1.0, True
    layer = re.search(r"\.layer\.(\d+)", name)
    below = 14 if "embeddings" in name else 13 - int(layer[1]) if layer else 0
    plain = ("gamma", "pos_embed", "rel_pos", "bias", "norm", "embeddings")
    return 1.5 * 0.7**2 * 0.8**below, not any(part in name for part in plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIMIZERS, "rfdetr_m"])
def test_every_weight_has_the_learning_rate_and_decay_of_the_authors(name):
    """On the names of the authors' smallest networks, see test_detr_layouts.py."""
    pytest.importorskip("transformers")
    from trainer.model.architecture import build
    from trainer.model.detr.tensor_names import rename_tensors
    from trainer.training.optim import build_optimizer

    config = recipes.load(name)
    network = {"dfine": "n", "rtdetr": "r18", "deimv2": "s", "rfdetr": "nano"}[config.model.architecture]
    listed = json.loads(gzip.decompress(NETWORKS.read_bytes()))[f"{config.model.architecture} {network}"]
    shapes = list(listed["names"].items())
    # The number of a name in its values says what it is called here.
    numbered = {key: torch.full(shape, float(number)) for number, (key, shape) in enumerate(shapes)}
    detector = build(replace(config.model, size=network), 80)
    renamed = rename_tensors(numbered, detector.tensor_rules)
    theirs = {key: shapes[int(value.flatten()[0])][0] for key, value in renamed.items() if value.numel()}
    optimizer = build_optimizer(detector, config.train)
    ours = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    differing = set()
    for key, weight in detector.named_parameters():
        if not weight.requires_grad:
            continue
        if name == "rfdetr_m":
            scale, decays = rfdetr_group(theirs[key])
        else:
            patterns = OPTIMIZERS[name]
            slow, decays = next(
                (group for expression, *group in patterns if re.search(expression, theirs[key])),
                (False, True),
            )
            scale = config.model.backbone_lr if slow else 1.0
        group = ours[id(weight)]
        assert group.get("lr_scale", 1.0) == pytest.approx(scale), key
        if group["weight_decay"] != (config.train.weight_decay if decays else 0.0):
            differing.add(key)
    slip = any(each.key == "decay of the backbone's norms" for each in differences_of(name))
    assert (
        all(key.startswith(("model.backbone.", "model.conv_encoder.")) for key in differing)
        and bool(differing) == slip
    )
