"""Recipes to published figures, compared with their sources key by key; docs/weights.md shows the same.

Published values are translated to this program's keys: a backbone's learning rate is relative to the rest's,
the epoch of a drop to all epochs. `python tests/trainer/test_published_recipes.py` prints the tables.
"""

import gzip
import inspect
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torchvision.models import detection
from torchvision.transforms import v2

from trainer.config import parsing
from trainer.config.schema import Config
from trainer.model import recipes

DOCS = Path(__file__).parents[2] / "docs" / "weights.md"
NETWORKS = Path(__file__).parent / "model/architectures/detr/authors_networks.json.gz"


class Row(NamedTuple):
    """A published setting: one for all recipes of a table, or one for each; ... if it does not apply."""

    key: str
    source: str
    values: tuple[Any, ...]


class Table(NamedTuple):
    """The settings of some recipes, and what their files are."""

    source: str
    recipes: tuple[str, ...]
    rows: tuple[Row, ...]


class Difference(NamedTuple):
    """A setting that is not as published: `ours` (None: not an option of this program) and the reason."""

    recipes: tuple[str, ...]
    key: str
    published: str
    ours: Any
    reason: str


def row(key: str, source: str, *values: Any) -> Row:
    return Row(key, source, values)


def sides(draws: int) -> list[int]:
    """The draws of `generate_scales(640, draws)` in src/data/dataloader.py of D-FINE."""
    return [480, 512, 544, 576, 608, *[640] * draws, 672, 704, 736, 768, 800]


DFINE = ("dfine_n", "dfine_s", "dfine_m", "dfine_l", "dfine_x", "dfine_finetune")
RTDETR = ("rtdetr_r18", "rtdetr_r34", "rtdetr_r50", "rtdetr_r101")
TORCHVISION = ("coco_r50", "fcos_r50", "faster_rcnn_r50")
MLPERF = ("mlperf",)
SSD = (
    row("loader.image_size", "dataloader.yml", 640),
    row("loader.resize", "dataloader.yml", "squash"),
    row("loader.fill", "dataloader.yml", 0),
    row("loader.zoom_out", "RandomZoomOut", 0.5),
    row("loader.iou_crop", "dataloader.yml", 0.8),
    row("loader.flip", "RandomHorizontalFlip", 0.5),
    row("loader.color_probability", "dataloader.yml", 0.5),
    row("loader.brightness", "RandomPhotometricDistort", 0.125),
    row("loader.contrast", "RandomPhotometricDistort", 0.5),
    row("loader.saturation", "RandomPhotometricDistort", 0.5),
    row("loader.hue", "RandomPhotometricDistort", 0.05),
    row("loader.channel_shuffle", "RandomPhotometricDistort", 0.5),
)
"""Transforms that D-FINE's and RT-DETR's `include/dataloader.yml` name, with torchvision's defaults."""
TABLES = (
    Table(
        "[Peterande/D-FINE](https://github.com/Peterande/D-FINE) at 4a1f73a, `configs/dfine/include` and "
        "`configs/dfine/dfine_hgnetv2_SIZE_coco.yml`; of dfine_finetune "
        "`configs/dfine/custom/objects365/dfine_hgnetv2_s_obj2custom.yml`; torchvision's transforms",
        DFINE,
        (
            row("AP", "README.md", 42.8, 48.5, 52.3, 54.0, 55.8, ...),
            *SSD,
            row("loader.sizes", "SIZE", [], sides(20), sides(6), sides(4), sides(3), sides(10)),
            row("loader.plain_epochs", "SIZE", 160 - 148, 132 - 120, 132 - 120, 80 - 72, 80 - 72, 64 - 56),
            row("model.architecture", "SIZE", "dfine"),
            row("model.size", "SIZE", *"nsmlxs"),
            row(
                "model.weights", "hgnetv2.py", *(f"PPHGNetV2_B{n}_stage1" for n in (0, 0, 2, 4, 5)), "obj365"
            ),
            row("model.queries", "dfine_hgnetv2.yml", 300),
            row("model.denoising", "dfine_hgnetv2.yml", 100),
            row("model.detections_per_image", "dfine_hgnetv2.yml", 300),
            row("model.score_threshold", "dfine_hgnetv2.yml", 0.0),
            row("model.sync_batchnorm", "runtime.yml", True),
            row("model.frozen_norm", "SIZE", False, False, False, True, True, False),
            row("model.frozen_stem", "SIZE", False, False, False, True, True, False),
            row("model.backbone_lr", "SIZE", 0.5, 0.5, 0.1, 0.05, 0.01, 0.5),
            row("train.epochs", "SIZE", 160, 132, 132, 80, 80, 64),
            row("train.global_batch", "SIZE", 128, 32, 32, 32, 32, 32),
            row("train.lr_batch", "SIZE", 128, 32, 32, 32, 32, 32),
            row("train.lr_scaling", "README.md", "linear"),
            row("train.scale_steps", "README.md", True),
            row("train.optimizer", "SIZE", "adamw"),
            row("train.lr", "SIZE", 8e-4, 2e-4, 2e-4, 2.5e-4, 2.5e-4, 2.5e-4),
            row("train.weight_decay", "SIZE", 1e-4, 1e-4, 1e-4, 1.25e-4, 1.25e-4, 1.25e-4),
            row("train.norm_weight_decay", "SIZE", 0.0),
            row("train.bias_weight_decay", "SIZE", 0.0, 0.0, 0.0, 1.25e-4, 1.25e-4, 0.0),
            row("train.schedule", "optimizer.yml", "multistep"),
            row("train.milestones", "optimizer.yml", []),
            row("train.warmup_steps", "optimizer.yml", 500, 500, 500, 500, 500, 0),
            row("train.clip_norm", "optimizer.yml", 0.1),
            row("train.ema_decay", "optimizer.yml", 0.9999),
            row("train.ema_ramp", "ema.py", *["exponential"] * 5, "constant"),
            row("train.ema_steps", "optimizer.yml", *[1000] * 5, ...),
            row("train.precision", "optimizer.yml", "fp16"),
        ),
    ),
    Table(
        "[lyuwenyu/RT-DETR](https://github.com/lyuwenyu/RT-DETR) at 068dfde, in "
        "`rtdetrv2_pytorch/configs/rtdetrv2` `include` and `rtdetrv2_SIZE_*_coco.yml`; "
        "torchvision's transforms",
        RTDETR,
        (
            row("AP", "README.md", 48.1, 49.9, 53.4, 54.3),
            *SSD,
            row("loader.sizes", "SIZE", [], sides(3), sides(3), sides(3)),
            row("loader.plain_epochs", "SIZE", 120 - 117, 120 - 117, 72 - 71, 72 - 71),
            row("model.architecture", "SIZE", "rtdetr"),
            row("model.size", "SIZE", "r18", "r34", "r50", "r101"),
            row(
                "model.weights",
                "presnet.py",
                *(
                    f"https://github.com/lyuwenyu/storage/releases/download/v0.1/{name}_from_paddle.pth"
                    for name in (
                        "ResNet18_vd_pretrained",
                        "ResNet34_vd_pretrained",
                        "ResNet50_vd_ssld_v2_pretrained",
                        "ResNet101_vd_ssld_pretrained",
                    )
                ),
            ),
            row("model.queries", "rtdetrv2_r50vd.yml", 300),
            row("model.denoising", "rtdetrv2_r50vd.yml", 100),
            row("model.detections_per_image", "rtdetrv2_r50vd.yml", 300),
            row("model.score_threshold", "rtdetrv2_r50vd.yml", 0.0),
            row("model.sync_batchnorm", "runtime.yml", True),
            row("model.frozen_norm", "SIZE", False, False, True, True),
            row("model.frozen_stem", "SIZE", False, False, True, True),
            row("model.backbone_lr", "SIZE", 1.0, 0.5, 0.1, 0.01),
            row("train.epochs", "SIZE", 120, 120, 72, 72),
            row("train.global_batch", "dataloader.yml", 16),
            row("train.lr_batch", "dataloader.yml", 16),
            row("train.optimizer", "optimizer.yml", "adamw"),
            row("train.lr", "optimizer.yml", 1e-4),
            row("train.weight_decay", "optimizer.yml", 1e-4),
            row("train.norm_weight_decay", "SIZE", 0.0),
            row("train.bias_weight_decay", "SIZE", 1e-4, 0.0, 1e-4, 1e-4),
            row("train.schedule", "optimizer.yml", "multistep"),
            row("train.milestones", "optimizer.yml", []),
            row("train.warmup_steps", "optimizer.yml", 2000),
            row("train.clip_norm", "optimizer.yml", 0.1),
            row("train.ema_decay", "optimizer.yml", 0.9999),
            row("train.ema_ramp", "ema.py", "exponential"),
            row("train.ema_steps", "optimizer.yml", 2000),
            row("train.precision", "optimizer.yml", "fp16"),
        ),
    ),
    Table(
        "pull requests [5756](https://github.com/pytorch/vision/pull/5756) (coco_r50) and "
        "[5763](https://github.com/pytorch/vision/pull/5763) (faster_rcnn_r50) of pytorch/vision, "
        "`references/detection` (fcos_r50: its README; presets.py at 8a347e1, train.py at 3ceb056), and the "
        "detectors of torchvision 0.29.2",
        TORCHVISION,
        (
            row("AP", "weights", 41.5, 39.2, 46.7),
            row("loader.image_size", "detector", "800 to 1333"),
            row("loader.sizes", "presets.py", [], [], [1024]),
            row("loader.scale", "presets.py", [0.6, 1.0], [1.0, 1.0], [0.1, 2.0]),
            row("loader.scale_draw", "presets.py", "uniform", "log", "uniform"),
            row("loader.flip", "presets.py", 0.5),
            row("model.architecture", "command", "retinanet", "fcos", "faster_rcnn"),
            row(
                "model.weights",
                "command",
                "torchvision:ResNet50_Weights.IMAGENET1K_V2",
                "torchvision:ResNet50_Weights.IMAGENET1K_V1",
                "",
            ),
            row("model.trainable_layers", "detector", 3, 3, 5),
            row("model.norm", "detector", "batch", "frozen", "batch"),
            row("model.sync_batchnorm", "command", True, False, True),
            row("model.detections_per_image", "detector", 300, 100, 100),
            row("model.score_threshold", "detector", 0.05, 0.2, 0.05),
            row("model.nms_threshold", "detector", 0.5, 0.6, 0.5),
            row("train.epochs", "command", 26, 26, 400),
            row("train.global_batch", "command", 8 * 2, 8 * 2, 4 * 8 * 2),
            row("train.lr_batch", "command", 8 * 2, 8 * 2, 4 * 8 * 2),
            row("train.optimizer", "command", "adamw", "sgd", "sgd"),
            row("train.lr", "command", 1e-4, 0.01, 0.1),
            row("train.momentum", "train.py", 0.9),
            row("train.weight_decay", "command", 0.05, 1e-4, 4e-5),
            row("train.norm_weight_decay", "command", 0.0, 1e-4, 4e-5),
            row("train.bias_weight_decay", "command", 0.05, 1e-4, 4e-5),
            row("train.schedule", "command", "multistep"),
            row("train.milestones", "command", *[[16 / 26, 22 / 26]] * 2, [352 / 400, 384 / 400]),
            row("train.gamma", "train.py", 0.1),
            row("train.warmup_steps", "engine.py", 1000),
            row("train.precision", "command", "fp32", "fp16", "fp32"),
        ),
    ),
    Table(
        "[mlcommons/training](https://github.com/mlcommons/training), `single_stage_detector` (later commits "
        "do not have it): README.md and transform.py at dc72f48, train.py at 7774404, "
        "config_DGXA100_001x08x032.sh at 0bc5696",
        MLPERF,
        (
            row("AP", "train.py", 34.0),
            row("loader.image_size", "train.py", 800),
            row("loader.resize", "transform.py", "squash"),
            row("loader.flip", "README.md", 0.5),
            row("model.architecture", "README.md", "retinanet"),
            row("model.version", "retinanet.py", "v1"),
            row("model.backbone", "train.py", "resnext50_32x4d"),
            row("model.weights", "README.md", "torchvision:ResNeXt50_32X4D_Weights.IMAGENET1K_V1"),
            row("model.norm", "README.md", "frozen"),
            row("model.trainable_layers", "train.py", 3),
            row("model.detections_per_image", "retinanet.py", 300),
            row("train.epochs", "config", 8),
            row("train.global_batch", "config", 8 * 32),
            row("train.lr_batch", "config", 8 * 32),
            row("train.optimizer", "train.py", "adam"),
            row("train.lr", "config", 1e-4),
            row("train.weight_decay", "train.py", 0.0),
            row("train.warmup_epochs", "train.py", 1.0),
            row("train.schedule", "engine.py", "multistep"),
            row("train.milestones", "engine.py", []),
            row("train.precision", "train.py", "fp16"),
        ),
    ),
)
HGNETS = {
    f"dfine_{size}": f"hf:timm/hgnetv2_b{number}.ssld_stage1_in22k_in1k"
    for size, number in {"n": 0, "s": 0, "m": 2, "l": 4, "x": 5}.items()
}
DIFFERENCES = (
    Difference(
        (*DFINE, *RTDETR, "fcos_r50", *MLPERF), "train.precision", "fp16", "bf16",
        "its range is that of fp32: no loss scaling",
    ),
    Difference(
        ("coco_r50", "faster_rcnn_r50"), "train.precision", "fp32", "bf16",
        "half the memory; losses stay in fp32",
    ),
    Difference(DFINE[:-1], "model.weights", "PPHGNetV2", HGNETS, "the same weights, published on the hub"),
    Difference(
        ("dfine_finetune",), "model.weights", "obj365", "hf:ustc-community/dfine-small-obj2coco",
        "trained on COCO too",
    ),
    Difference(
        ("dfine_finetune",), "model.score_threshold", "0", 0.05, "the model is for use, not for a table",
    ),
    Difference(("dfine_finetune",), "model.sync_batchnorm", "yes", False, "PyTorch has it for GPUs only"),
    Difference(("dfine_finetune",), "train.minutes", "none", 240.0, "fewer epochs on slow machines"),
    Difference(
        ("dfine_finetune",), "train.ema_ramp", "constant", "inverse",
        "in the 640 steps of 300 images a constant average would keep 94 % of the first weights",
    ),
    Difference(
        DFINE, "ema_restart_decay", "0.9999, X 0.9998", None,
        "their code sets it for the plain epochs, but the average does not read it (`ema.py`)",
    ),
    Difference(
        DFINE, "plain epochs", "begin from the best weights so far", None, "no such restart",
    ),
    Difference(
        ("dfine_n", "dfine_s", "dfine_m", "dfine_finetune"), "decay of the backbone's norms",
        "as its weights", None, "their expression names `norm`, the modules are `bn` and `lab`; here 0",
    ),
    Difference(
        (*DFINE, *RTDETR), "loader.sizes",
        "each process draws one, and resizes from 640 to the nearest pixel", None,
         "the same on all processes, resized once and antialiased",
    ),
    Difference(
        (*DFINE, *RTDETR), "loader.contrast", "about the image's mean grey, first or last", None,
        "about mid grey, last: colours are one affine map on the device",
    ),
    Difference(RTDETR, "train.lr_scaling, train.scale_steps", "not said", None, "linear, yes: as D-FINE"),
    Difference(
        TORCHVISION, "loader.image_size", "800 to 1333", 1120,
        "theirs: shorter side 800, longer at most 1333; in a square of 1120, 100 images of COCO val2014 "
        "have 1.014 of that scale on average (0.84 to 1.40)",
    ),
    Difference(
        ("coco_r50",), "loader.scale", "11 shorter sides, 480 to 800", None, "any size from 0.6 to 1",
    ),
    Difference(("faster_rcnn_r50",), "loader.fill", "123, 117, 104", None, "114 for all channels"),
    Difference(MLPERF, "train.epochs", "8", 6, "theirs end at 34.0 mAP, after 4 to 6"),
    Difference(MLPERF, "loader.resize", "bilinear", None, "bilinear, antialiased"),
)  # fmt: skip
FREE = {
    "loader.workers", "loader.prefetch", "train.batch_size", "train.compile", "train.validate_every",
}  # fmt: skip
"""Options that change how a training runs, not what it learns."""


def settings(name: str) -> dict[str, Any]:
    return parsing.flat(asdict(recipes.load(name)))


def ours_of(name: str, difference: Difference) -> Any:
    return difference.ours[name] if isinstance(difference.ours, dict) else difference.ours


def shown(value: Any) -> str:
    """A value as the docs show it."""
    match value:
        case e if e is ...:
            return "-"
        case bool():
            return "yes" if value else "no"
        case []:
            return "none"
        case [480, *_]:
            return f"640 in {value.count(640)} of {len(value)}, else 480-800"
        case [float(), *_]:
            return ", ".join(f"{part:.3g}" for part in value)
        case float():
            return f"{value:g}"
        case [int(), *_]:
            return ", ".join(map(str, value))
    return str(value).rpartition("/")[2] or "none"


def published(table: Table, name: str) -> dict[str, Any]:
    """Values of a recipe by key, those that apply."""
    column = table.recipes.index(name)
    values = {each.key: each.values[column if len(each.values) > 1 else 0] for each in table.rows}
    return {key: value for key, value in values.items() if value is not ...}


def render() -> str:
    """The tables in Markdown: what differs between recipes, what all have, and where ours are different."""
    lines: list[str] = []
    for table in TABLES:
        lines += [f"### {', '.join(table.recipes)}", "", f"Source: {table.source}.", ""]
        several = [each for each in table.rows if len(set(map(shown, each.values))) > 1]
        if several:
            lines += [f"| key | {' | '.join(table.recipes)} | file |"]
            lines += ["| --- " * (len(table.recipes) + 2) + "|"]
        for each in several:
            cells = " | ".join(map(shown, each.values))
            lines.append(f"| `{each.key}` | {cells} | {each.source} |")
        lines += ["", "All of them:", ""] if several else []
        same: dict[str, list[str]] = {}
        for each in table.rows:
            if each not in several:
                value = shown(each.values[0])
                same.setdefault(each.source, []).append(f"`{each.key}` {value}")
        lines += [f"- {source}: {', '.join(settings)}" for source, settings in same.items()] + [""]
    lines += ["### Differences", "", "| recipes | key | published | ours | reason |", "| --- " * 5 + "|"]
    for each in DIFFERENCES:
        ours = "" if each.ours is None else "timm" if isinstance(each.ours, dict) else shown(each.ours)
        names = ", ".join(each.recipes)
        for group, title in ((DFINE, "dfine_*"), (RTDETR, "rtdetr_*"), (DFINE[:-1], "dfine_{n,s,m,l,x}")):
            names = names.replace(", ".join(group), title)
        lines.append(f"| {names} | {each.key} | {each.published} | {ours} | {each.reason} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", [name for table in TABLES for name in table.recipes])
def test_a_recipe_is_as_published_or_says_why_not(name):
    (table,) = [table for table in TABLES if name in table.recipes]
    ours, sources = settings(name), published(table, name)
    own = [each for each in DIFFERENCES if name in each.recipes]
    changes = {each.key: ours_of(name, each) for each in own if each.ours is not None}
    for key, value in sources.items():
        if key in changes:
            assert ours[key] == changes.pop(key) != value, key
        elif "." in key:
            mine = sorted(ours[key]) if key == "loader.sizes" else ours[key]
            assert mine == (pytest.approx(value) if isinstance(value, float) else value), key
    assert all(ours[key] == value for key, value in changes.items())
    # No option of the recipe is without a source or a reason.
    defaults = parsing.flat(asdict(Config(model=type(recipes.load(name).model)())))
    changed = {key for key, value in ours.items() if value != defaults.get(key)} - sources.keys() - FREE
    reasons = {key for each in own for key in each.key.split(", ")}
    assert {key for key in changed if key.startswith(("loader.", "model.", "train."))} <= reasons


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
    built = {
        "coco_r50": (detection.RetinaNet, "", detection.RetinaNet_ResNet50_FPN_V2_Weights),
        "fcos_r50": (detection.FCOS, "", detection.FCOS_ResNet50_FPN_Weights),
        "faster_rcnn_r50": (detection.FasterRCNN, "box_", detection.FasterRCNN_ResNet50_FPN_V2_Weights),
    }
    (table,) = [table for table in TABLES if table.recipes == TORCHVISION]
    for name, (kind, prefix, weights) in built.items():
        values, theirs = published(table, name), inspect.signature(kind).parameters
        assert weights.COCO_V1.meta["_metrics"]["COCO-val2017"]["box_map"] == values["AP"]
        assert (theirs["min_size"].default, theirs["max_size"].default) == (800, 1333)
        for key, argument in {
            "model.detections_per_image": "detections_per_img", "model.score_threshold": "score_thresh",
            "model.nms_threshold": "nms_thresh",
        }.items():  # fmt: skip
            assert theirs[prefix + argument].default == values[key]


_OF_BACKBONE, _OF_REST = "(?=.*backbone)", "(?=.*(?:encoder|decoder))"
_LIKE_S = (
    (f"^{_OF_BACKBONE}(?!.*norm|bn).*$", True, True),
    (f"^{_OF_BACKBONE}(?=.*norm|bn).*$", True, False),
    (f"^{_OF_REST}(?=.*(?:norm|bn|bias)).*$", False, False),
)
_LIKE_L = (
    (f"^{_OF_BACKBONE}(?!.*norm|bn).*$", True, True),
    (f"^{_OF_REST}(?=.*(?:norm|bn)).*$", False, False),
)
OPTIMIZERS = {
    **dict.fromkeys(("dfine_n", "dfine_s", "dfine_m", "dfine_finetune", "rtdetr_r34"), _LIKE_S),
    **dict.fromkeys(("dfine_l", "dfine_x", "rtdetr_r50", "rtdetr_r101"), _LIKE_L),
    "rtdetr_r18": (("^(?=.*(?:norm|bn)).*$", False, False),),
}
"""`optimizer.params` of the authors' files: an expression of names, whether the group has the backbone's
learning rate, and whether it decays. That of rtdetr_r50 lacks `|bn`, which no name of its backbone has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_weight_has_the_learning_rate_and_decay_of_the_authors(name):
    """On the names of the authors' smallest networks, see test_detr_layouts.py."""
    pytest.importorskip("transformers")
    from trainer.model.architecture import build
    from trainer.model.architectures.detr.layouts import library_names
    from trainer.training.optim import build_optimizer

    config = recipes.load(name)
    network = {"dfine": "n", "rtdetr": "r18"}[config.model.architecture]
    listed = json.loads(gzip.decompress(NETWORKS.read_bytes()))[f"{config.model.architecture} {network}"]
    shapes = list(listed["names"].items())
    # The number of a name in its values says what it is called here.
    numbered = {key: torch.full(shape, float(number)) for number, (key, shape) in enumerate(shapes)}
    renamed = library_names(numbered, config.model.architecture)
    theirs = {key: shapes[int(value.flatten()[0])][0] for key, value in renamed.items() if value.numel()}
    detector = build(replace(config.model, size=network), 80)
    optimizer = build_optimizer(detector, config.train)
    ours = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    differing = set()
    for key, weight in detector.named_parameters():
        if not weight.requires_grad:
            continue
        slow, decays = next(
            (group for pattern, *group in OPTIMIZERS[name] if re.search(pattern, theirs[key])), (False, True)
        )
        group = ours[id(weight)]
        assert group.get("lr_scale", 1.0) == (config.model.backbone_lr if slow else 1.0), key
        if group["weight_decay"] != (config.train.weight_decay if decays else 0.0):
            differing.add(key)
    slip = any(each.key == "decay of the backbone's norms" and name in each.recipes for each in DIFFERENCES)
    assert all(key.startswith("model.backbone.") for key in differing) and bool(differing) == slip


def test_the_docs_show_these_tables():
    assert render() in DOCS.read_text()


if __name__ == "__main__":
    print(render(), end="")
