"""Distances between two sets of images, each from 0 (equal) to 1, with their confidence."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import laplace
from scipy.spatial.distance import cdist, chebyshev, cityblock
from scipy.stats import bootstrap, permutation_test
from torch.utils._pytree import tree_leaves

from trainer import storage
from trainer.base.errors import DataError, EvaluationError
from trainer.data.data_views import Shards, View, open_view, pictures
from trainer.data.inspection import cleaned_samples, is_sized
from trainer.data.problem_counts import Problems
from trainer.data.samples import AnnotatedImage
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.evaluate import DriftRequest
from trainer.evaluation.metrics import DRIFT
from trainer.report.figures import SERIES, as_plot, bars, render
from trainer.training import checkpoint

PAGE = "drift.html"
CLASSES, FEATURES = "drift/classes", "drift/features"
SIGNIFICANCE = 0.05  # A distance with a smaller p is unlikely to be chance.
_MAX_IMAGES = 20_000  # Images whose annotations are compared; a larger set is sampled.
_SAMPLED = 200

Values = list[list[Any]]  # Of each image: a number for each of its boxes, or one for itself, or none.
Measured = tuple["ComparedSet", dict[str, Values]]  # A set, and its properties by the names in metrics.DRIFT.
EmbedImage = Callable[[Image.Image], np.ndarray]  # From an image to its features [D].


@dataclass(frozen=True)
class Shift:
    """A distance with its 95 % interval."""

    value: float
    low: float
    high: float
    p: float  # Probability of such a distance if only chance separates the sets.
    chance: float  # 95 % of the distances by chance are below it.


@dataclass(frozen=True)
class ComparedSet:
    """A split of a set of images."""

    uri: str
    split: str
    images: int


@dataclass(frozen=True)
class Drift:
    """The content of drift.json: two sets and their distances, by the names in metrics.DRIFT."""

    sets: list[ComparedSet]
    metrics: dict[str, float]  # The distances, 0 to 1.
    shifts: dict[str, Shift]
    medians: dict[str, list[float]]  # Of both sets.
    classes: dict[str, list[float]]  # The share of a class in the boxes of both sets, by its name.


def for_gate(request: DriftRequest) -> dict[str, float]:
    """Return the distances for rules of the gate; write page and record into the evaluation's folder."""
    count = _SAMPLED if request.names & {"drift/brightness", "drift/sharpness", FEATURES} else 0
    model_uri = request.model if FEATURES in request.names else ""
    before, now = open_view(request.before), open_view(request.now)
    drift = compare(before, now, pictures=count, seed=request.seed, model_uri=model_uri)
    write(drift, request.output)
    return drift.metrics


def compare(
    one: View, other: View, *, split: str = "", pictures: int = _SAMPLED, samples: int = 200, seed: int = 0,
    model_uri: str = "",
) -> Drift:  # fmt: skip
    """Measure the distances between two sets.

    `split` is that of both; empty is train if both have it, else the first that both have. The pixels of so
    many random `pictures` of each set are measured. `samples` are bootstrap samples, and permutations. The
    backbone of the detector in the checkpoint `model_uri` gives features; empty leaves these out.
    """
    common = [name for name in one.splits if name in other.splits]
    split = split or ("train" if "train" in common else [*common, "train"][0])
    if split not in common:
        raise DataError(
            f"{one.uri} and {other.uri} must both have the split {split}",
            fix=f"choose another --split: they have {', '.join(one.splits)} and {', '.join(other.splits)}",
        )
    embed = _embedding(model_uri) if model_uri else None
    measured = [_measure_set(view, split, pictures, seed, embed) for view in (one, other)]
    (left, before), (right, after) = measured
    shifts, medians = {}, {}
    for name in DRIFT:
        if any(before[name]) and any(after[name]):
            shifts[name] = measure(name, before[name], after[name], samples=samples, seed=seed)
            if name not in (CLASSES, FEATURES):
                values = [list(chain.from_iterable(of_set[name])) for of_set in (before, after)]
                medians[name] = [float(np.median(of_set)) for of_set in values]
    counts = [Counter(chain.from_iterable(of_set[CLASSES])) for of_set in (before, after)]
    classes = {
        name: [count[name] / max(count.total(), 1) for count in counts] for name in (*one.names, *other.names)
    }
    return Drift([left, right], {name: shifts[name].value for name in shifts}, shifts, medians, classes)


def measure(name: str, before: Values, after: Values, *, samples: int = 200, seed: int = 0) -> Shift:
    """Return the distance of a metric between the images of two sets, with its confidence.

    It is the total variation of classes, the energy distance of features as a share of its maximum (Szekely
    and Rizzo, Energy statistics, 2013), and the Kolmogorov-Smirnov statistic of all others. The interval is
    from a bootstrap and p from a permutation test, with so many `samples`. Both draw whole images, because
    the boxes of an image are not independent.
    """
    of_images, total = before + after, len(before) + len(after)
    values = np.array(list(chain.from_iterable(of_images)))
    images = np.repeat(np.arange(total), [len(each) for each in of_images])
    if name == FEATURES:
        between = cdist(values, values)
    else:
        _, kinds = np.unique(values, return_inverse=True)

    def statistic(*drawn: np.ndarray) -> float:
        """Return the distance of two sets of numbers of images, in which a number may be repeated."""
        weights = [np.bincount(side.astype(int), minlength=total) for side in drawn]
        if name == FEATURES:
            left, right = (side / side.sum() for side in weights)
            across = 2 * left @ between @ right
            within = left @ between @ left + right @ between @ right
            return float(np.clip((across - within) / max(across, 1e-12), 0, 1))
        counts = [np.bincount(kinds, weights=side[images]) for side in weights]
        if name == CLASSES:
            return float(cityblock(*(of_set / max(of_set.sum(), 1) for of_set in counts)) / 2)
        return float(chebyshev(*(of_set.cumsum() / max(of_set.sum(), 1) for of_set in counts)))

    sets = np.arange(len(before)), np.arange(len(before), total)
    value = statistic(*sets)
    if min(map(len, sets)) < 2:  # For scipy a single image has no confidence.
        return Shift(value, value, value, 1.0, 1.0)
    # Memory grows with the number of images times `batch`, the samples that scipy draws at once.
    random = np.random.default_rng(seed)
    options: dict[str, Any] = {"n_resamples": samples, "batch": 16, "vectorized": False, "rng": random}
    spread = np.array([value])
    if samples > 1:
        spread = bootstrap(sets, statistic, method="percentile", **options).bootstrap_distribution
    # Resampled sets are further apart than the sets that they are drawn from: shifted by the bias.
    low, high = (np.percentile(spread, [2.5, 97.5]) - (spread.mean() - value)).clip(0, 1).tolist()
    test = permutation_test(sets, statistic, alternative="greater", **options)
    return Shift(value, low, high, float(test.pvalue), float(np.percentile(test.null_distribution, 95)))


def _measure_set(view: View, split: str, count: int, seed: int, embed: EmbedImage | None) -> Measured:
    random = np.random.default_rng(seed)
    rows: list[tuple[AnnotatedImage, bool]] = []  # With cleaned boxes, and whether their sizes are pixels.
    if isinstance(view, Shards):
        truth = ShardDataset(view.uri, split).annotations()
        of_ids: dict[int, Any] = {image["id"]: {**image, "annotations": []} for image in truth["images"]}
        for box in truth["annotations"]:
            of_ids[box["image_id"]]["annotations"].append(box)
        rows = [(sample, True) for sample in of_ids.values()]
    else:
        for batch in view.batches(split):
            sound = [row for row in batch.to_pylist() if not row["fault_reason"]]
            samples = cleaned_samples(sound, len(view.names), Problems())
            rows += zip(samples, map(is_sized, sound), strict=True)
    total = len(rows)
    if total > _MAX_IMAGES:
        rows = [rows[number] for number in np.sort(random.choice(total, _MAX_IMAGES, replace=False))]
    images = [each.image for each in pictures(view, split, count, random) if each.image]
    if not rows or (count and not images):
        raise DataError(
            f"{view.uri} has no readable images in {split}",
            fix="choose another --split, or run `kubedet data verify` to see the reasons",
        )
    properties: dict[str, Values] = {name: [] for name in DRIFT}
    for sample, sized in rows:
        boxes = sample["annotations"]
        properties[CLASSES].append([view.names[box["category_id"]] for box in boxes])
        properties["drift/boxes_per_image"].append([len(boxes)])
        if sized:
            properties["drift/box_size"].append([np.sqrt(box["bbox"][2] * box["bbox"][3]) for box in boxes])
            properties["drift/image_size"].append([max(sample["width"], sample["height"])])
    for image in images:
        small = image.convert("L")
        small.thumbnail((512, 512), Image.Resampling.BOX)  # Sharpness would depend on the size.
        shades = np.asarray(small, float) / 255
        properties["drift/brightness"].append([shades.mean()])
        inside = laplace(shades)[1:-1, 1:-1]  # Pixels of the border lack neighbors.
        properties["drift/sharpness"].append([np.log10(np.mean(inside**2) + 1e-8)] if inside.size else [])
        properties[FEATURES].append([embed(image)] if embed else [])
    return ComparedSet(view.uri, split, total), properties


def _embedding(uri: str) -> EmbedImage:
    """Return a function that averages the last feature map of a detector's backbone."""
    detector, meta = checkpoint.load_model(uri)
    backbone = next((part for name, part in detector.named_modules() if name.endswith("backbone")), None)
    if backbone is None:
        raise EvaluationError(
            f"the model {uri} has no backbone that can extract features",
            fix="omit --model, or use the checkpoint of another detector",
        )
    side = meta["config"]["loader"]["image_size"]
    outputs: list[Any] = []
    backbone.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))

    @torch.inference_mode()
    def embed(image: Image.Image) -> np.ndarray:
        square = np.array(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
        detector.predict(torch.from_numpy(square).permute(2, 0, 1)[None])
        maps = [part for part in tree_leaves(outputs.pop()) if getattr(part, "ndim", 0) == 4]
        return maps[-1].float().mean(dim=(0, 2, 3)).numpy()

    return embed


def write(drift: Drift, output_uri: str) -> None:
    """Write drift.json and drift.html, which needs no other file, into a folder."""
    rows = []
    for name, shift in drift.shifts.items():
        medians = [f"{median:.4g}" for median in drift.medians.get(name, [])] or ["-", "-"]
        interval = f"{shift.low:.3f} to {shift.high:.3f}"
        rows.append([name, f"{shift.value:.3f}", interval, f"{shift.p:.3f}", f"{shift.chance:.3f}", *medians])
    moved = [DRIFT[name] for name, shift in drift.shifts.items() if shift.p < SIGNIFICANCE]
    missing = [DRIFT[name] for name in DRIFT if name not in drift.shifts]
    lines = [
        *(f"{letter}: {part.uri}, {part.images:,} images of {part.split}"
          for letter, part in zip("AB", drift.sets, strict=True)),
        f"More than chance moved: {', '.join(moved) or 'nothing'}.",
        "0 is equal, 1 has nothing in common. p: probability of such a distance by chance alone.",
        *([f"Not measured: {', '.join(missing)}."] if missing else []),
    ]  # fmt: skip
    most = sorted(drift.classes, key=lambda name: -np.ptp(drift.classes[name]))[:20]
    drawn, _ = bars("share of the boxes", most, *np.array([drift.classes[name] for name in most]).T)
    plot = as_plot("Classes that changed most", drawn, ((SERIES[0], "A"), (SERIES[1], "B")))
    page = render(
        "plots_page.html.jinja", title="Drift of data", remark="\n".join(lines), recipe="", plots=[plot],
        header=["metric", "distance", "95 % interval", "p", "by chance up to", "median of A", "median of B"],
        rows=rows,
    )  # fmt: skip
    storage.write_bytes(storage.join(output_uri, PAGE), page.encode())
    storage.write_json(storage.join(output_uri, "drift.json"), asdict(drift))
