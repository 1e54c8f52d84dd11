"""How far two sets of images are apart, each distance from 0 (the same) to 1, with its confidence.

A distance is a function of the weight of each image. Its interval comes from the bootstrap over the images of
each set, its p-value from a permutation test in which images change sides. Boxes of an image are drawn
together, because they are not independent.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.spatial.distance import cdist
from scipy.stats import bootstrap, permutation_test
from torch import Tensor

from trainer import storage
from trainer.base.errors import DataError, EvaluationError
from trainer.config.schema import DataConfig
from trainer.data.data_views import Listing, RawImages, Shards, SourceRows, open_view
from trainer.data.inspection import cleaned_samples, is_sized
from trainer.data.problem_counts import Problems
from trainer.data.raw_folder import RawManifest
from trainer.data.samples import AnnotatedImage, Annotation
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.evaluate import DriftRequest
from trainer.evaluation.metrics import DRIFT
from trainer.report.figures import SERIES, as_plot, bars, render
from trainer.training import checkpoint

RECORD, PAGE = "drift.json", "drift.html"
SIGNIFICANCE = 0.05
"""A p-value below it is called a change."""
_MOST_IMAGES = 20_000
"""Images whose annotations are compared, drawn at random if there are more."""
_SIDE = 512
"""Longer side at which sharpness is measured, so that it does not depend on the image's size."""
_BATCH = 16
"""Samples that are computed together: all boxes of each are in memory."""
_PICTURES = 200
"""Images of each set whose pixels a rule of the gate looks at."""
_OF_PIXELS = {"drift/brightness", "drift/sharpness", "drift/features"}
_CLASSES = 20
"""Classes whose shares are drawn: those that changed most."""

View = Shards | RawImages | SourceRows
Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Of weights [n, S] of all n images on the one side and on the other: S distances."""
Embed = Callable[[Image.Image], np.ndarray]
"""Features of an image, [D]."""


@dataclass(frozen=True)
class Shift:
    """How far two sets are apart in one respect."""

    value: float
    """The distance, 0 to 1."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    p: float
    """Probability that sets that differ by chance alone are as far apart."""
    chance: float
    """95 % of such distances are below it."""

    @property
    def sure(self) -> bool:
        """Whether more than chance moved them apart."""
        return self.p < SIGNIFICANCE


class Numbers(NamedTuple):
    """Numbers that are measured of images."""

    values: np.ndarray
    """[m]."""
    images: np.ndarray
    """[m] the image of each, 0 to n - 1."""
    total: int
    """n."""


@dataclass(frozen=True)
class Measurements:
    """The measured properties of a split of a set."""

    uri: str
    split: str
    images: int
    """In the split."""
    classes: list[str]
    counts: np.ndarray
    """[n, K] boxes of each class in each image."""
    numbers: Mapping[str, Numbers]
    """By the names in metrics.DRIFT, without those that could not be measured."""
    features: np.ndarray
    """[p, D]; [p, 0] without a detector."""


@dataclass(frozen=True)
class Drift:
    """Both sets, and how far apart they are."""

    one: Measurements
    other: Measurements
    classes: list[str]
    """Of either."""
    shares: np.ndarray
    """[2, K] share of each class among the boxes of each set."""
    shifts: Mapping[str, Shift]
    """By the names in metrics.DRIFT, without those that could not be measured."""

    @property
    def metrics(self) -> dict[str, float]:
        """The distances, 0 to 1, by name."""
        return {name: shift.value for name, shift in self.shifts.items()}

    def medians(self, name: str) -> list[float]:
        """Return the median of both sets' numbers; [] for a property that is no number."""
        pair = [part.numbers.get(name) for part in (self.one, self.other)]
        return [float(np.median(numbers.values)) for numbers in pair if numbers]

    def to_json(self) -> dict[str, Any]:
        """Return the content of drift.json."""
        sets = (self.one, self.other)
        return {
            "sets": [{"uri": part.uri, "split": part.split, "images": part.images} for part in sets],
            "metrics": self.metrics,
            "shifts": {name: asdict(shift) for name, shift in self.shifts.items()},
            "medians": {name: found for name in self.shifts if (found := self.medians(name))},
            "classes": dict(zip(self.classes, self.shares.T.tolist(), strict=True)),
        }


def compare_data(
    one_uri: str, other_uri: str, *, split: str = "", pictures: int = _PICTURES, samples: int = 200,
    seed: int = 0, model_uri: str = "", data: DataConfig | None = None,
) -> Drift:  # fmt: skip
    """Measure how far two sets of data are apart.

    Args:
        one_uri: shards, raw images or a source, see `trainer.data.data_views.open_view`.
        other_uri: likewise.
        split: of both; empty is train if both have it, else the first that both have.
        pictures: images of each whose pixels are measured, drawn at random.
        samples: bootstrap samples, and permutations.
        seed: of the random draws.
        model_uri: checkpoint of a detector whose backbone gives features; empty leaves these out.
        data: how sources are read.

    Raises:
        DataError: one cannot be used, or they have no split in common.
        EvaluationError: the model has no backbone whose features can be taken.
        StorageError, CheckpointError: something cannot be read.
    """
    embed = _embedding(model_uri) if model_uri else None
    views: list[View] = [open_view(uri, data or DataConfig()) for uri in (one_uri, other_uri)]
    chosen = split or _common_split(views)
    for view in views:
        if chosen not in view.splits:
            raise DataError(
                f"{view.uri} has no split {chosen}", fix=f"its splits are {', '.join(view.splits)}"
            )
    one, other = (_measure_set(view, chosen, pictures, seed, embed) for view in views)
    classes = list(dict.fromkeys([*one.classes, *other.classes]))
    totals = np.array([_counts(part, classes).sum(axis=0) for part in (one, other)])
    shares = totals / np.maximum(totals.sum(axis=1, keepdims=True), 1)
    return Drift(one, other, classes, shares, _shifts(one, other, samples=samples, seed=seed))


def compare_listings(one: RawManifest, other: RawManifest) -> dict[str, float]:
    """Return how far the annotations of two raw folders are apart, 0 to 1 by name; reads no image.

    Raises:
        DataError: they have no split in common, or a table is damaged.
        StorageError: a table cannot be read.
    """
    views: list[View] = [Listing(one), Listing(other)]
    split = _common_split(views)
    measured = [_measure_set(view, split, 0, 0, None) for view in views]
    return {name: shift.value for name, shift in _shifts(*measured, samples=0, seed=0).items()}


def for_gate(request: DriftRequest) -> dict[str, float]:
    """Return the distances in rules of the gate; write page and record into the evaluation's folder."""
    drift = compare_data(
        request.before, request.now, seed=request.seed,
        pictures=_PICTURES if request.names & _OF_PIXELS else 0,
        model_uri=request.model if "drift/features" in request.names else "",
    )  # fmt: skip
    write(drift, request.output)
    return drift.metrics


def write(drift: Drift, output_uri: str) -> None:
    """Write drift.json and drift.html into a folder; raise StorageError if that fails."""
    storage.write_bytes(storage.join(output_uri, PAGE), page(drift).encode())
    storage.write_json(storage.join(output_uri, RECORD), drift.to_json())


def _common_split(views: list[View]) -> str:
    one, other = (view.splits for view in views)
    common = [split for split in one if split in other]
    if not common:
        raise DataError(
            f"the sets have no split in common: {', '.join(one)} against {', '.join(other)}",
            fix="compare sets with a split of the same name",
        )
    return "train" if "train" in common else common[0]


def _shifts(one: Measurements, other: Measurements, *, samples: int, seed: int) -> dict[str, Shift]:
    """Return the shifts by the names in metrics.DRIFT."""
    classes = list(dict.fromkeys([*one.classes, *other.classes]))
    counts = [_counts(part, classes) for part in (one, other)]
    distances: dict[str, tuple[Distance, int, int]] = {}
    if all(part.any() for part in counts):
        distances["drift/classes"] = (of_frequencies(np.concatenate(counts)), len(counts[0]), len(counts[1]))
    for name in one.numbers.keys() & other.numbers.keys():
        left, right = one.numbers[name], other.numbers[name]
        images = np.r_[left.images, right.images + left.total]
        distances[name] = (of_values(np.r_[left.values, right.values], images), left.total, right.total)
    if one.features.size and other.features.size:
        distance = of_vectors(np.concatenate([one.features, other.features]))
        distances["drift/features"] = (distance, len(one.features), len(other.features))
    return {
        name: measure(*distances[name], samples=samples, seed=seed) for name in DRIFT if name in distances
    }


def _counts(part: Measurements, classes: list[str]) -> np.ndarray:
    """[n, K] boxes of each of `classes` in each image."""
    counts = np.zeros((len(part.counts), len(classes)))
    counts[:, [classes.index(name) for name in part.classes]] = part.counts
    return counts


def measure(distance: Distance, one: int, other: int, *, samples: int = 200, seed: int = 0) -> Shift:
    """Return a distance with its confidence.

    `distance` is of the images of both sets, the `one` (at least one) first. `samples` of the bootstrap, and
    permutations; 0 leaves the confidence out.
    """
    sets = np.arange(one), np.arange(one, one + other)

    def statistic(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
        found = distance(_weights(left, one + other), _weights(right, one + other))
        return found if left.ndim > 1 else found[0]

    value = float(statistic(*sets))
    if not samples:
        return Shift(value, value, value, 1.0, 1.0)
    options: dict[str, Any] = {
        "n_resamples": samples, "batch": _BATCH, "vectorized": True, "rng": np.random.default_rng(seed),
    }  # fmt: skip
    spread = np.array([value])
    if min(one, other) > 1 < samples:  # Of one image there is one sample, and of one sample no spread.
        spread = bootstrap(sets, statistic, method="percentile", **options).bootstrap_distribution
    # Resampled sets are further apart than the sets that they are drawn from: shifted by the bias.
    ends = np.percentile(spread, [2.5, 97.5]) - (spread.mean() - value)
    low, high = map(float, np.clip(ends, 0, 1))
    test = permutation_test(sets, statistic, alternative="greater", **options)
    return Shift(value, low, high, float(test.pvalue), float(np.percentile(test.null_distribution, 95)))


def _weights(images: np.ndarray, total: int) -> np.ndarray:
    """[total, S] weight of each image in S samples, given as [S, m] or [m] numbers of images."""
    samples = np.atleast_2d(images).astype(int)
    shifted = samples + total * np.arange(len(samples))[:, None]
    return np.bincount(shifted.ravel(), minlength=total * len(samples)).reshape(-1, total).T.astype(float)


def of_frequencies(counts: np.ndarray) -> Distance:
    """Total variation of the class frequencies; counts: [n, K] boxes of each class in each image."""

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        totals = (counts.T @ weights for weights in (one, other))
        shares = [each / np.maximum(each.sum(axis=0), 1e-12) for each in totals]
        return np.asarray(np.abs(shares[0] - shares[1]).sum(axis=0) / 2)

    return distance


def of_values(values: np.ndarray, images: np.ndarray) -> Distance:
    """Distance of Kolmogorov and Smirnov; values: [m]; images: [m] the image of each."""
    order = np.argsort(values, kind="stable")
    ordered, of_image = values[order], images[order]
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        sums = (np.cumsum(weights[of_image], axis=0) for weights in (one, other))
        shares = [each[last] / np.maximum(each[-1], 1e-12) for each in sums]
        return np.asarray(np.abs(shares[0] - shares[1]).max(axis=0))

    return distance


def of_vectors(vectors: np.ndarray) -> Distance:
    """The energy distance as a share: 0 for the same distributions, 1 if each is one point; vectors: [n, D].

    (Szekely and Rizzo, Energy statistics, 2013: the coefficient of inhomogeneity.)
    """
    between = cdist(vectors, vectors)

    def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        left, right = (weights / weights.sum(axis=0) for weights in (one, other))
        across = 2 * (left * (between @ right)).sum(axis=0)
        within = sum((side * (between @ side)).sum(axis=0) for side in (left, right))
        return np.clip((across - within) / np.maximum(across, 1e-12), 0, 1)

    return distance


def _measure_set(view: View, split: str, pictures: int, seed: int, embed: Embed | None) -> Measurements:
    random = np.random.default_rng(seed)
    rows = list(_rows(view, split))
    if not rows:
        raise DataError(f"{view.uri} has no images in {split}", fix="choose another --split")
    total = len(rows)
    if total > _MOST_IMAGES:
        rows = [rows[place] for place in np.sort(random.choice(total, _MOST_IMAGES, replace=False))]
    counts = np.zeros((len(rows), len(view.names)))
    sides, places, image_sides = [], [], []
    for place, (sample, sized) in enumerate(rows):
        for box in sample["annotations"]:
            counts[place, box["category_id"]] += 1
            if sized:
                sides.append(np.sqrt(box["bbox"][2] * box["bbox"][3]))
                places.append(place)
        if sized:
            image_sides.append(max(sample["width"], sample["height"]))
    looked_at = [
        (_luminance(picture.image), embed(picture.image) if embed else np.zeros(0))
        for picture in view.pictures(split, pictures, random)
        if picture.image is not None
    ]
    if pictures and not looked_at:
        raise DataError(
            f"none of the images of {view.uri} that were looked at can be read",
            fix="`kubedet data verify` tells what is wrong with them",
        )
    of_images: dict[str, Any] = {
        "drift/boxes_per_image": counts.sum(axis=1),
        "drift/image_size": image_sides,
        "drift/brightness": [luminance.mean() for luminance, _ in looked_at],
        "drift/sharpness": [_sharpness(luminance) for luminance, _ in looked_at],
    }
    numbers = {
        name: Numbers(np.array(values, float), np.arange(len(values)), len(values))
        for name, values in of_images.items()
    }
    numbers["drift/box_size"] = Numbers(np.array(sides, float), np.array(places, int), len(rows))
    return Measurements(
        view.uri, split, total, list(view.names), counts,
        {name: each for name, each in numbers.items() if len(each.values)},
        np.array([features for _, features in looked_at]) if looked_at else np.zeros((0, 0)),
    )  # fmt: skip


def _rows(view: View, split: str) -> Iterator[tuple[AnnotatedImage, bool]]:
    """Yield samples with the boxes that cleaning keeps, and whether their sizes are pixels."""
    if isinstance(view, Shards):
        truth = ShardDataset(view.uri, split).annotations()
        boxes: dict[int, list[Annotation]] = {image["id"]: [] for image in truth["images"]}
        for box in truth["annotations"]:
            boxes[box["image_id"]].append(box)
        for image in truth["images"]:
            annotations = boxes[image["id"]]
            yield {"width": image["width"], "height": image["height"], "annotations": annotations}, True
        return
    for block in view.blocks(split):
        sound = [row for row in block if not row["fault_reason"]]
        samples = cleaned_samples(sound, len(view.names), Problems())
        for row, sample in zip(sound, samples, strict=True):
            yield sample, is_sized(row)


def _luminance(image: Image.Image) -> np.ndarray:
    """[h, w] from 0 to 1, of the image made as small as _SIDE."""
    small = image.convert("L")
    small.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    return np.asarray(small, float) / 255


def _sharpness(image: np.ndarray) -> float:
    if min(image.shape) < 3:
        return float(np.log10(1e-8))
    inner = image[1:-1, 1:-1]
    around = image[:-2, 1:-1] + image[2:, 1:-1] + image[1:-1, :-2] + image[1:-1, 2:]
    return float(np.log10(np.mean((around - 4 * inner) ** 2) + 1e-8))


def _embedding(uri: str) -> Embed:
    """Return what gives the mean of the last feature map of a detector's backbone."""
    detector, meta = checkpoint.load_model(uri)
    backbone = next((part for name, part in detector.named_modules() if name.endswith("backbone")), None)
    if backbone is None:
        raise EvaluationError(
            f"the model {uri} has no backbone whose features can be taken", fix="leave --model out, or give "
            "the checkpoint of another detector",
        )  # fmt: skip
    side = meta["config"]["loader"]["image_size"]

    maps: list[Tensor] = []
    backbone.register_forward_hook(lambda _module, _inputs, output: maps.extend(_maps(output)))

    @torch.inference_mode()
    def embed(image: Image.Image) -> np.ndarray:
        square = np.array(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
        maps.clear()
        detector.predict(torch.from_numpy(square).permute(2, 0, 1)[None])
        return maps[-1].float().mean(dim=(0, 2, 3)).numpy()

    return embed


def _maps(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.ndim == 4 else []
    parts = output.values() if isinstance(output, dict) else output
    return [one for part in parts for one in _maps(part)] if isinstance(output, dict | list | tuple) else []


def page(drift: Drift) -> str:
    """Return the page as HTML that needs no other file."""
    changes = drift.shares[1] - drift.shares[0]
    classes = [  # With shares and change, the largest change first.
        (drift.classes[place], *drift.shares[:, place].tolist(), float(changes[place]))
        for place in np.argsort(-np.abs(changes), kind="stable")
    ]
    plots = []
    if classes:
        names, one, other, _ = zip(*classes[:_CLASSES], strict=True)
        drawn, _ = bars("share of the boxes", names, one, other)
        plots.append(as_plot("Classes that changed most", drawn, ((SERIES[0], "A"), (SERIES[1], "B"))))
    rows = [
        {"name": name, "meaning": DRIFT[name], "shift": shift,
         "medians": [f"{value:.4g}" for value in drift.medians(name)] or ["-", "-"]}
        for name, shift in drift.shifts.items()
    ]  # fmt: skip
    return render(
        "drift_page.html.jinja", drift=drift, plots=plots, rows=rows, classes=classes, few=_CLASSES,
        missing=[DRIFT[name] for name in DRIFT if name not in drift.shifts],
        sure=[DRIFT[name] for name, shift in drift.shifts.items() if shift.sure],
    )  # fmt: skip
