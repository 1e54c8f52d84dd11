"""Compares two sets of data: measures both, and writes drift.json and drift.html."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trainer import storage
from trainer.base.errors import DataError, EvaluationError
from trainer.config.schema import DataConfig
from trainer.data.data_views import Listing, RawImages, Shards, SourceRows, open_view
from trainer.drift.comparing import Drift, find_drift
from trainer.drift.measurements import Embed, measure_set
from trainer.report.drift_page import page
from trainer.training import checkpoint

RECORD, PAGE = "drift.json", "drift.html"
_BACKBONE = "backbone"


def compare_data(
    one_uri: str, other_uri: str, *, split: str = "", pictures: int = 200, samples: int = 200, seed: int = 0,
    model_uri: str = "", data: DataConfig | None = None,
) -> Drift:  # fmt: skip
    """Tell how far two sets of data are apart.

    Args:
        one_uri: shards, raw images or a source, as `trainer.data.data_views.open_view` takes it.
        other_uri: likewise.
        split: of both; empty is train where both have it, else the first that both have.
        pictures: images of each whose pixels are looked at, drawn at random.
        samples: bootstrap samples, and permutations.
        seed: of what is drawn.
        model_uri: checkpoint of a detector whose backbone gives features; empty leaves these out.
        data: how sources are read.

    Raises:
        DataError: one cannot be used, or they have no split in common.
        EvaluationError: the model has no backbone whose features can be taken.
        StorageError, CheckpointError: something cannot be read.
    """
    data = data or DataConfig()
    embed = _embedding(model_uri) if model_uri else None
    views = [open_view(uri, data) for uri in (one_uri, other_uri)]
    chosen = split or _common_split(views)
    for view in views:
        if chosen not in view.splits:
            raise DataError(
                f"{view.uri} has no split {chosen}", fix=f"its splits are {', '.join(view.splits)}"
            )
    measured = [measure_set(view, chosen, pictures=pictures, seed=seed, embed=embed) for view in views]
    return find_drift(*measured, samples=samples, seed=seed)


def compare_listings(one: dict[str, Any], other: dict[str, Any]) -> Drift:
    """Tell how far the annotations of two listings are apart; no image is looked at.

    Args:
        one: plan or manifest of a folder of raw images, as `trainer.data.raw_folder` reads it.
        other: likewise.

    Raises:
        DataError: they have no split in common, or a table is damaged.
        StorageError: a table cannot be read.
    """
    views: list[Shards | RawImages | SourceRows] = [Listing(part["uri"], part) for part in (one, other)]
    split = _common_split(views)
    return find_drift(*(measure_set(view, split, pictures=0) for view in views), samples=1)


def write(drift: Drift, output_uri: str) -> None:
    """Write drift.json and drift.html into a folder.

    Raises:
        StorageError: it cannot be written.
    """
    storage.write_bytes(storage.join(output_uri, PAGE), page(drift).encode())
    storage.write_json(storage.join(output_uri, RECORD), drift.to_json())


def _common_split(views: list[Shards | RawImages | SourceRows]) -> str:
    one, other = (view.splits for view in views)
    common = [split for split in one if split in other]
    if not common:
        raise DataError(
            f"the sets have no split in common: {', '.join(one)} against {', '.join(other)}",
            fix="compare sets with a split of the same name",
        )
    return "train" if "train" in common else common[0]


def _embedding(uri: str) -> Embed:
    """Return what gives the mean of the last feature map of a detector's backbone."""
    detector, meta = checkpoint.load_model(uri)
    backbone = next((part for name, part in detector.named_modules() if name.endswith(_BACKBONE)), None)
    if backbone is None:
        raise EvaluationError(
            f"the model {uri} has no backbone whose features can be taken", fix="leave --model out, or give "
            "the checkpoint of another detector",
        )  # fmt: skip
    side = meta["config"]["loader"]["image_size"]

    @torch.inference_mode()
    def embed(image: Image.Image) -> np.ndarray:
        square = np.array(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
        pixels = torch.from_numpy(square).permute(2, 0, 1)[None]
        maps = _features(detector, backbone, pixels)
        return maps[-1].float().mean(dim=(0, 2, 3)).numpy()

    return embed


def _features(detector: nn.Module, backbone: nn.Module, pixels: Tensor) -> list[Tensor]:
    """Return the feature maps [1, C, h, w] that a backbone gives in a forward pass of its detector."""
    maps: list[Tensor] = []
    hook = backbone.register_forward_hook(lambda _module, _inputs, output: maps.extend(_maps(output)))
    try:
        detector.predict(pixels)  # type: ignore[operator]  # An Architecture's.
    finally:
        hook.remove()
    return maps


def _maps(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.ndim == 4 else []
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else []
    )
    return [one for part in parts for one in _maps(part)]
