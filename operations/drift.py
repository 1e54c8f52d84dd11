"""Distances between two sets of images, each from 0 (equal) to 1, with their confidence.

Intervals come from a bootstrap over images and p-values from a permutation test. Both draw whole images,
because the boxes of an image are not independent.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from trainer.data import data_views
from trainer.data.data_views import RawImages, Shards, View, open_view
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
CLASSES, FEATURES = "drift/classes", "drift/features"
SIGNIFICANCE = 0.05
_MOST_IMAGES = 20_000  # Images whose annotations are compared; a larger set is sampled.
_SIDE = 512  # Longer side at which sharpness is measured, so that it does not depend on the image's size.
_BATCH = 16  # Bootstrap samples per call: memory grows with the number of boxes times this.
_PICTURES = 200
_PLOTTED_CLASSES = 20

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From weights [n, S] of the n images of both sets in one and in the other to S distances."""
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


class Property(NamedTuple):
    """A measured property of images, such as the sizes of their boxes."""

    values: np.ndarray  # [m], features [m, D].
    images: np.ndarray  # [m] the image of each value, 0 to total - 1.
    total: int


@dataclass(frozen=True)
class Measurements:
    """The measured properties of a split of a set, by the names in metrics.DRIFT."""

    uri: str
    split: str
    images: int
    classes: list[str]
    properties: dict[str, Property]


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


def compare_data(
    one_uri: str, other_uri: str, *, split: str = "", pictures: int = _PICTURES, samples: int = 200,
    seed: int = 0, model_uri: str = "", data: DataConfig | None = None,
) -> Drift:  # fmt: skip
    """Measure the distances between two sets, see `trainer.data.data_views.open_view`.

    `split` is that of both; empty is train if both have it, else the first that both have. The pixels of so
    many random `pictures` of each set are measured. `samples` are bootstrap samples, and permutations. The
    backbone of the detector in the checkpoint `model_uri` gives features; empty leaves these out. `data` says
    how sources are read.
    """
    views: list[View] = [open_view(uri, data or DataConfig()) for uri in (one_uri, other_uri)]
    embed = _embedding(model_uri) if model_uri else None
    return _compare(views, split, pictures, samples, seed, embed)


def compare_listings(one: RawManifest, other: RawManifest) -> dict[str, float]:
    """Return the distances between the annotations of two raw folders by name; reads no image."""
    return _compare(
        [RawImages(one, all_listed=True), RawImages(other, all_listed=True)],
        "",
        pictures=0,
        samples=0,
        seed=0,
        embed=None,
    ).metrics


def for_gate(request: DriftRequest) -> dict[str, float]:
    """Return the distances for rules of the gate; write page and record into the evaluation's folder."""
    reads_pixels = request.names & {"drift/brightness", "drift/sharpness", FEATURES}
    drift = compare_data(
        request.before, request.now, seed=request.seed, pictures=_PICTURES if reads_pixels else 0,
        model_uri=request.model if FEATURES in request.names else "",
    )  # fmt: skip
    write(drift, request.output)
    return drift.metrics


def _compare(
    views: Sequence[View], split: str, pictures: int, samples: int, seed: int, embed: Embed | None
) -> Drift:
    one, other = (view.splits for view in views)
    common = [name for name in one if name in other]
    if split not in ("", *common) or not common:
        wanted = f"the split {split}" if split else "a split"
        raise DataError(
            f"{views[0].uri} and {views[1].uri} do not both have {wanted}",
            fix=f"their splits are {', '.join(one)} and {', '.join(other)}: compare sets with a common one",
        )
    split = split or ("train" if "train" in common else common[0])
    left, right = (_measure_set(view, split, pictures, seed, embed) for view in views)
    shifts = {}
    for name in DRIFT:
        if name in left.properties and name in right.properties:
            before, after = left.properties[name], right.properties[name]
            images = np.concatenate([before.images, after.images + before.total])
            values = np.concatenate([before.values, after.values])
            distance = {CLASSES: of_frequencies, FEATURES: of_vectors}.get(name, of_values)(values, images)
            shifts[name] = measure(distance, before.total, after.total, samples=samples, seed=seed)
    return Drift(left, right, shifts)


def measure(distance: Distance, one: int, other: int, *, samples: int = 200, seed: int = 0) -> Shift:
    """Return a distance with its confidence.

    `one` and `other` count the images of both sets, in this order in the weights. `samples` is the number of
    bootstrap samples and of permutations; 0 leaves the confidence out.
    """
    sets = np.arange(one), np.arange(one, one + other)

    def statistic(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
        distances = distance(_weights(left, one + other), _weights(right, one + other))
        return distances if left.ndim > 1 else distances[0]

    value = float(statistic(*sets))
    if not samples:
        return Shift(value, value, value, 1.0, 1.0)
    options: dict[str, Any] = {
        "n_resamples": samples, "batch": _BATCH, "vectorized": True, "rng": np.random.default_rng(seed),
    }  # fmt: skip
    spread = np.array([value])
    if min(one, other) > 1 < samples:  # scipy needs two images and two samples.
        spread = bootstrap(sets, statistic, method="percentile", **options).bootstrap_distribution
    # Resampled sets are further apart than the sets that they are drawn from: shifted by the bias.
    ends = np.percentile(spread, [2.5, 97.5]) - (spread.mean() - value)
    low, high = map(float, np.clip(ends, 0, 1))
    test = permutation_test(sets, statistic, alternative="greater", **options)
    return Shift(value, low, high, float(test.pvalue), float(np.percentile(test.null_distribution, 95)))


def _weights(images: np.ndarray, total: int) -> np.ndarray:
    """[total, S] how often each image is in each of S samples, given as [S, m] or [m] numbers of images."""
    samples = np.atleast_2d(images).astype(int)
    shifted = samples + total * np.arange(len(samples))[:, None]
    return np.bincount(shifted.ravel(), minlength=total * len(samples)).reshape(-1, total).T.astype(float)


def of_frequencies(values: np.ndarray, images: np.ndarray) -> Distance:
    """Total variation of the frequencies of values; both [m]."""
    _, kinds = np.unique(values, return_inverse=True)
    counts = np.zeros((images.max() + 1, kinds.max() + 1))
    np.add.at(counts, (images, kinds), 1)

    def shares(weights: np.ndarray) -> np.ndarray:
        totals = counts.T @ weights[: len(counts)]
        return np.asarray(totals / np.maximum(totals.sum(axis=0), 1e-12))

    return lambda one, other: np.abs(shares(one) - shares(other)).sum(axis=0) / 2


def of_values(values: np.ndarray, images: np.ndarray) -> Distance:
    """Kolmogorov-Smirnov statistic of weighted values; both [m]."""
    order = np.argsort(values, kind="stable")
    ordered, of_image = values[order], images[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))

    def shares(weights: np.ndarray) -> np.ndarray:
        sums = np.cumsum(weights[of_image], axis=0)
        return np.asarray(sums[last] / np.maximum(sums[-1], 1e-12))

    return lambda one, other: np.abs(shares(one) - shares(other)).max(axis=0)


def of_vectors(vectors: np.ndarray, _images: np.ndarray) -> Distance:
    """Energy distance as a share of its maximum (Szekely and Rizzo, Energy statistics, 2013); [n, D]."""
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
        rows = [rows[number] for number in np.sort(random.choice(total, _MOST_IMAGES, replace=False))]
    classes, sides = [], []
    for number, (sample, sized) in enumerate(rows):
        for box in sample["annotations"]:
            classes.append((number, view.names[box["category_id"]]))
            if sized:
                sides.append((number, np.sqrt(box["bbox"][2] * box["bbox"][3])))
    drawn = data_views.pictures(view, split, pictures, random)
    images = [each.image for each in drawn if each.image is not None]
    if pictures and not images:
        raise DataError(
            f"none of the sampled images of {view.uri} can be read",
            fix="`kubedet data verify` shows the reasons",
        )
    brightness, sharpness = [], []
    for picture in images:
        small = picture.convert("L")
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
        pixels = np.asarray(small, float) / 255
        inner, laplacian = pixels[1:-1, 1:-1], np.zeros(1)
        if inner.size:
            around = pixels[:-2, 1:-1] + pixels[2:, 1:-1] + pixels[1:-1, :-2] + pixels[1:-1, 2:]
            laplacian = around - 4 * inner
        brightness.append(pixels.mean())
        sharpness.append(np.log10(np.mean(laplacian**2) + 1e-8))
    of_images: dict[str, list[Any]] = {
        "drift/boxes_per_image": [float(len(sample["annotations"])) for sample, _ in rows],
        "drift/image_size": [float(max(each["width"], each["height"])) for each, sized in rows if sized],
        "drift/brightness": brightness,
        "drift/sharpness": sharpness,
        FEATURES: [embed(image) for image in images] if embed else [],
    }
    properties = {
        name: Property(np.array(values), np.arange(len(values)), len(values))
        for name, values in of_images.items()
        if values
    }
    for name, pairs in ((CLASSES, classes), ("drift/box_size", sides)):
        if pairs:
            numbers, values = zip(*pairs, strict=True)
            properties[name] = Property(np.array(values), np.array(numbers), len(rows))
    return Measurements(view.uri, split, total, list(view.names), properties)


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
    sets, names = (drift.one, drift.other), [*drift.one.classes, *drift.other.classes]
    counts = [Counter(part.properties[CLASSES].values.tolist() if CLASSES in part.properties else ())
              for part in sets]  # fmt: skip
    shares = {name: [count[name] / max(count.total(), 1) for count in counts] for name in names}
    medians = {name: [float(np.median(part.properties[name].values)) for part in sets]
               for name in drift.shifts if name not in (CLASSES, FEATURES)}  # fmt: skip
    record = {
        "sets": [{"uri": part.uri, "split": part.split, "images": part.images} for part in sets],
        "metrics": drift.metrics,
        "shifts": {name: asdict(shift) for name, shift in drift.shifts.items()},
        "medians": medians,
        "classes": shares,
    }
    moved = [DRIFT[name] for name, shift in drift.shifts.items() if shift.sure]
    missing = [DRIFT[name] for name in DRIFT if name not in drift.shifts]
    lines = [f"{letter}: {part.uri}, {part.images:,} images of {part.split}"
             for letter, part in zip("AB", sets, strict=True)]  # fmt: skip
    lines.append(f"More than chance moved: {', '.join(moved) or 'nothing'}.")
    lines.append("0 is equal, 1 has nothing in common. p: probability of such a distance by chance alone.")
    if missing:
        lines.append(f"Not measured: {', '.join(missing)}.")
    rows = [
        [name, f"{shift.value:.3f}", f"{shift.low:.3f} to {shift.high:.3f}", f"{shift.p:.3f}",
         f"{shift.chance:.3f}", *(f"{median:.4g}" for median in medians.get(name, [])), "-", "-"][:7]
        for name, shift in drift.shifts.items()
    ]  # fmt: skip
    plots = []
    if shares:
        most = sorted(shares.items(), key=lambda pair: -abs(pair[1][1] - pair[1][0]))[:_PLOTTED_CLASSES]
        columns = np.array([pair for _, pair in most]).T
        drawn, _ = bars("share of the boxes", [name for name, _ in most], *columns)
        plots.append(as_plot("Classes that changed most", drawn, ((SERIES[0], "A"), (SERIES[1], "B"))))
    page = render(
        "plots_page.html.jinja", title="Drift of data", remark="\n".join(lines), recipe="", plots=plots,
        header=["metric", "distance", "95 % interval", "p", "by chance up to", "median of A", "median of B"],
        rows=rows,
    )  # fmt: skip
    storage.write_bytes(storage.join(output_uri, PAGE), page.encode())
    storage.write_json(storage.join(output_uri, RECORD), record)
