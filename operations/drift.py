"""Distances between two sets of images, each from 0 (equal) to 1, with their confidence.

Intervals come from a bootstrap over images and p-values from a permutation test. Both draw whole images,
because the boxes of an image are not independent.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import laplace
from scipy.spatial.distance import cdist
from scipy.stats import bootstrap, permutation_test
from torch import Tensor

from trainer import storage
from trainer.base.errors import DataError, EvaluationError
from trainer.data import data_views
from trainer.data.data_views import Shards, View, open_view
from trainer.data.inspection import cleaned_samples, is_sized
from trainer.data.problem_counts import Problems
from trainer.data.samples import AnnotatedImage
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.evaluate import DriftRequest
from trainer.evaluation.metrics import DRIFT
from trainer.report.figures import SERIES, as_plot, bars, render
from trainer.training import checkpoint

RECORD, PAGE = "drift.json", "drift.html"
CLASSES, FEATURES = "drift/classes", "drift/features"
SIGNIFICANCE = 0.05
_MOST_IMAGES = 20_000  # Images whose annotations are compared; a larger set is sampled.
_SIDE = 512  # Longer side at which sharpness is measured, so that it does not depend on the image's size.
_BATCH = 16  # Samples that scipy draws at once: memory grows with the number of images times this.
_PICTURES = 200
_PLOTTED_CLASSES = 20

Distance = Callable[[np.ndarray, np.ndarray], float]
"""From weights [n] of the n images of both sets in one and in the other to a distance."""
Embed = Callable[[Image.Image], np.ndarray]  # From an image to its features [D].


@dataclass(frozen=True)
class Shift:
    """A distance with its 95 % interval."""

    value: float
    low: float
    high: float
    p: float  # Probability of such a distance if only chance separates the sets.
    chance: float  # 95 % of the distances by chance are below it.

    @property
    def sure(self) -> bool:
        """Whether chance alone is unlikely."""
        return self.p < SIGNIFICANCE


@dataclass(frozen=True)
class Measurements:
    """The measured properties of a split of a set: a list of values for each image."""

    uri: str
    split: str
    images: int
    classes: list[str]
    properties: dict[str, list[list[Any]]]  # By the names in metrics.DRIFT.


@dataclass(frozen=True)
class Drift:
    """Two sets and their distances, by the names in metrics.DRIFT."""

    one: Measurements
    other: Measurements
    shifts: dict[str, Shift]

    @property
    def metrics(self) -> dict[str, float]:
        """The distances, 0 to 1, by name."""
        return {name: shift.value for name, shift in self.shifts.items()}


def for_gate(request: DriftRequest) -> dict[str, float]:
    """Return the distances for rules of the gate; write page and record into the evaluation's folder."""
    reads_pixels = request.names & {"drift/brightness", "drift/sharpness", FEATURES}
    drift = compare(
        open_view(request.before), open_view(request.now), seed=request.seed,
        pictures=_PICTURES if reads_pixels else 0,
        model_uri=request.model if FEATURES in request.names else "",
    )  # fmt: skip
    write(drift, request.output)
    return drift.metrics


def compare(
    one: View, other: View, *, split: str = "", pictures: int = _PICTURES, samples: int = 200, seed: int = 0,
    model_uri: str = "",
) -> Drift:  # fmt: skip
    """Measure the distances between two sets.

    `split` is that of both; empty is train if both have it, else the first that both have. The pixels of so
    many random `pictures` of each set are measured. `samples` are bootstrap samples, and permutations. The
    backbone of the detector in the checkpoint `model_uri` gives features; empty leaves these out.
    """
    common = [name for name in one.splits if name in other.splits]
    if split not in ("", *common) or not common:
        wanted = f"the split {split}" if split else "a split"
        splits = f"{', '.join(one.splits)} and {', '.join(other.splits)}"
        raise DataError(
            f"{one.uri} and {other.uri} do not both have {wanted}",
            fix=f"their splits are {splits}: compare sets with a common one",
        )
    split = split or ("train" if "train" in common else common[0])
    embed = _embedding(model_uri) if model_uri else None
    left, right = (_measure_set(view, split, pictures, seed, embed) for view in (one, other))
    shifts = {}
    for name in DRIFT:
        if name in left.properties and name in right.properties:
            before, after = left.properties[name], right.properties[name]
            of_images = before + after
            values = np.array(list(chain.from_iterable(of_images)))
            images = np.repeat(np.arange(len(of_images)), [len(each) for each in of_images])
            if name == FEATURES:
                distance = of_vectors(values)
            else:
                distance = of_values(values, images, ordered=name != CLASSES)
            shifts[name] = measure(distance, len(before), len(after), samples=samples, seed=seed)
    return Drift(left, right, shifts)


def measure(distance: Distance, one: int, other: int, *, samples: int = 200, seed: int = 0) -> Shift:
    """Return a distance with its confidence.

    `one` and `other` count the images of both sets, in this order in the weights. `samples` is the number of
    bootstrap samples and of permutations; 0 leaves the confidence out.
    """
    sets = np.arange(one), np.arange(one, one + other)

    def statistic(*drawn: np.ndarray) -> float:
        """Return the distance of two sets of numbers of images, in which a number may be repeated."""
        left, right = (np.bincount(side.astype(int), minlength=one + other) for side in drawn)
        return distance(left, right)

    value = statistic(*sets)
    if not samples:
        return Shift(value, value, value, 1.0, 1.0)
    options: dict[str, Any] = {
        "n_resamples": samples, "batch": _BATCH, "vectorized": False, "rng": np.random.default_rng(seed),
    }  # fmt: skip
    spread = np.array([value])
    if min(one, other) > 1 < samples:  # scipy needs two images and two samples.
        spread = bootstrap(sets, statistic, method="percentile", **options).bootstrap_distribution
    # Resampled sets are further apart than the sets that they are drawn from: shifted by the bias.
    ends = np.percentile(spread, [2.5, 97.5]) - (spread.mean() - value)
    low, high = map(float, np.clip(ends, 0, 1))
    test = permutation_test(sets, statistic, alternative="greater", **options)
    return Shift(value, low, high, float(test.pvalue), float(np.percentile(test.null_distribution, 95)))


def of_values(values: np.ndarray, images: np.ndarray, *, ordered: bool = True) -> Distance:
    """Kolmogorov-Smirnov statistic of values, or total variation of their frequencies if not `ordered`.

    `images` has the image of each value; both [m].
    """
    _, kinds = np.unique(values, return_inverse=True)

    def shares(weights: np.ndarray) -> np.ndarray:
        counts = np.bincount(kinds, weights=weights[images])
        return np.asarray((counts.cumsum() if ordered else counts) / max(counts.sum(), 1))

    def distance(one: np.ndarray, other: np.ndarray) -> float:
        differences = abs(shares(one) - shares(other))
        return float(differences.max() if ordered else differences.sum() / 2)

    return distance


def of_vectors(vectors: np.ndarray) -> Distance:
    """Energy distance as a share of its maximum (Szekely and Rizzo, Energy statistics, 2013); [n, D]."""
    between = cdist(vectors, vectors)

    def distance(one: np.ndarray, other: np.ndarray) -> float:
        left, right = one / one.sum(), other / other.sum()
        across = 2 * left @ between @ right
        within = left @ between @ left + right @ between @ right
        return float(np.clip((across - within) / max(across, 1e-12), 0, 1))

    return distance


def _measure_set(view: View, split: str, pictures: int, seed: int, embed: Embed | None) -> Measurements:
    random = np.random.default_rng(seed)
    rows = list(_rows(view, split))
    if not rows:
        raise DataError(f"{view.uri} has no images in {split}", fix="choose another --split")
    total = len(rows)
    if total > _MOST_IMAGES:
        rows = [rows[number] for number in np.sort(random.choice(total, _MOST_IMAGES, replace=False))]
    drawn = data_views.pictures(view, split, pictures, random)
    images = [each.image for each in drawn if each.image is not None]
    if pictures and not images:
        raise DataError(
            f"none of the sampled images of {view.uri} can be read",
            fix="`kubedet data verify` shows the reasons",
        )
    properties: dict[str, list[list[Any]]] = {name: [] for name in DRIFT}
    for sample, sized in rows:
        boxes = sample["annotations"]
        sides = [np.sqrt(box["bbox"][2] * box["bbox"][3]) for box in boxes]
        properties[CLASSES].append([view.names[box["category_id"]] for box in boxes])
        properties["drift/boxes_per_image"].append([len(boxes)])
        properties["drift/box_size"].append(sides if sized else [])
        if sized:
            properties["drift/image_size"].append([max(sample["width"], sample["height"])])
    for image in images:
        small = image.convert("L")
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
        pixels = np.asarray(small, float) / 255
        properties["drift/brightness"].append([pixels.mean()])
        properties["drift/sharpness"].append([np.log10(np.mean(laplace(pixels) ** 2) + 1e-8)])
        properties[FEATURES].append([embed(image)] if embed else [])
    measured = {name: values for name, values in properties.items() if any(values)}
    return Measurements(view.uri, split, total, list(view.names), measured)


def _rows(view: View, split: str) -> Iterator[tuple[AnnotatedImage, bool]]:
    """Yield samples with the boxes that cleaning keeps, and whether their sizes are pixels."""
    if isinstance(view, Shards):
        truth = ShardDataset(view.uri, split).annotations()
        images: dict[int, Any] = {image["id"]: {**image, "annotations": []} for image in truth["images"]}
        for box in truth["annotations"]:
            images[box["image_id"]]["annotations"].append(box)
        yield from ((image, True) for image in images.values())
        return
    for batch in view.batches(split):
        sound = [row for row in batch.to_pylist() if not row["fault_reason"]]
        samples = cleaned_samples(sound, len(view.names), Problems())
        yield from zip(samples, map(is_sized, sound), strict=True)


def _embedding(uri: str) -> Embed:
    """Return a function that averages the last feature map of a detector's backbone."""
    detector, meta = checkpoint.load_model(uri)
    backbone = next((part for name, part in detector.named_modules() if name.endswith("backbone")), None)
    if backbone is None:
        raise EvaluationError(
            f"the model {uri} has no backbone whose features can be taken",
            fix="leave --model out, or give the checkpoint of another detector",
        )
    side = meta["config"]["loader"]["image_size"]
    maps: list[Tensor] = []

    def keep(output: Any) -> None:
        if isinstance(output, Tensor):
            maps.extend([output] if output.ndim == 4 else [])
        elif isinstance(output, dict | list | tuple):
            for part in output.values() if isinstance(output, dict) else output:
                keep(part)

    backbone.register_forward_hook(lambda _module, _inputs, output: keep(output))

    @torch.inference_mode()
    def embed(image: Image.Image) -> np.ndarray:
        square = np.array(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
        maps.clear()
        detector.predict(torch.from_numpy(square).permute(2, 0, 1)[None])
        return maps[-1].float().mean(dim=(0, 2, 3)).numpy()

    return embed


def write(drift: Drift, output_uri: str) -> None:
    """Write drift.json and drift.html, which needs no other file, into a folder."""
    sets = (drift.one, drift.other)
    counts = [Counter(chain.from_iterable(part.properties.get(CLASSES, []))) for part in sets]
    shares = {
        name: [count[name] / max(count.total(), 1) for count in counts]
        for name in (*drift.one.classes, *drift.other.classes)
    }
    medians = {
        name: [float(np.median(list(chain.from_iterable(part.properties[name])))) for part in sets]
        for name in drift.shifts
        if name not in (CLASSES, FEATURES)
    }
    record = {
        "sets": [{"uri": part.uri, "split": part.split, "images": part.images} for part in sets],
        "metrics": drift.metrics,
        "shifts": {name: asdict(shift) for name, shift in drift.shifts.items()},
        "medians": medians,
        "classes": shares,
    }
    moved = [DRIFT[name] for name, shift in drift.shifts.items() if shift.sure]
    missing = [DRIFT[name] for name in DRIFT if name not in drift.shifts]
    lines = [
        *(f"{letter}: {part.uri}, {part.images:,} images of {part.split}"
          for letter, part in zip("AB", sets, strict=True)),
        f"More than chance moved: {', '.join(moved) or 'nothing'}.",
        "0 is equal, 1 has nothing in common. p: probability of such a distance by chance alone.",
        *([f"Not measured: {', '.join(missing)}."] if missing else []),
    ]  # fmt: skip
    rows = []
    for name, shift in drift.shifts.items():
        of_sets = [f"{median:.4g}" for median in medians[name]] if name in medians else ["-", "-"]
        interval = f"{shift.low:.3f} to {shift.high:.3f}"
        rows.append([name, f"{shift.value:.3f}", interval, f"{shift.p:.3f}", f"{shift.chance:.3f}", *of_sets])
    plots = []
    if shares:
        most = sorted(shares, key=lambda name: -abs(shares[name][1] - shares[name][0]))[:_PLOTTED_CLASSES]
        drawn, _ = bars("share of the boxes", most, *np.array([shares[name] for name in most]).T)
        plots.append(as_plot("Classes that changed most", drawn, ((SERIES[0], "A"), (SERIES[1], "B"))))
    page = render(
        "plots_page.html.jinja", title="Drift of data", remark="\n".join(lines), recipe="", plots=plots,
        header=["metric", "distance", "95 % interval", "p", "by chance up to", "median of A", "median of B"],
        rows=rows,
    )  # fmt: skip
    storage.write_bytes(storage.join(output_uri, PAGE), page.encode())
    storage.write_json(storage.join(output_uri, RECORD), record)
