"""The paired bootstrap: exact where it can be computed otherwise, and right about its confidence."""

import numpy as np
import pytest

from benchmarks.large_split import synthetic
from tests.trainer.evaluation.test_engines import average_precision, matched, odd_case
from trainer.evaluation import bootstrap, coco
from trainer.evaluation.truth_and_predictions import Predictions, Truth


def test_a_weight_is_the_image_so_many_times() -> None:
    """Two copies of an image, all boxes with them, score as the image with weight 2."""
    for seed in range(40):
        truth, detections = odd_case(seed)
        # Without ties, whose order among the copies would be another.
        detections = Predictions(
            *detections.columns()[:3], detections.scores + 1e-9 * np.arange(len(detections))
        )
        random = np.random.default_rng(seed)
        weights = random.integers(0, 3, len(truth.images))
        repeated_truth, repeated = repeat(truth, detections, weights)
        if not len(repeated_truth.image_ids):
            continue
        matches = matched(truth, detections)
        copies = matched(repeated_truth, repeated)
        for place in range(len(truth.categories)):
            ours = bootstrap._resample(matches, place, weights[:, None].astype(np.uint8))[0, 0]
            expected = average_precision(copies, place)
            assert np.isnan(ours) == np.isnan(expected)
            assert np.isnan(ours) or ours == pytest.approx(expected, abs=1e-9)


def repeat(truth: Truth, detections: Predictions, weights: np.ndarray) -> tuple[Truth, Predictions]:
    copied = np.repeat(truth.all_image_ids, weights)
    images = [{"id": number, "width": 200, "height": 200} for number in range(len(copied))]
    # The rows of each copy, and the number of the copy that they are of.
    copies, rows = np.nonzero(copied[:, None] == truth.image_ids)
    found_copies, found_rows = np.nonzero(copied[:, None] == detections.image_ids)
    columns = (column[rows] for column in (truth.labels, truth.boxes, truth.areas, truth.crowd))
    kept = detections.take(found_rows)
    return (
        Truth(images, truth.categories, copies, *columns),
        Predictions(found_copies, kept.labels, kept.boxes, kept.scores),
    )


def scene(quality: float, seed: int, images: int = 120) -> tuple[Truth, Predictions]:
    """One object an image, found with that probability; the same objects for every seed."""
    random = np.random.default_rng(seed)
    boxes = np.tile([50.0, 50.0, 40.0, 40.0], (images, 1))
    truth = Truth(
        [{"id": i, "width": 200, "height": 200} for i in range(images)],
        [{"id": 1, "name": "cat"}],
        np.arange(images),
        np.ones(images, int),
        boxes,
        np.full(images, 1600.0),
        np.zeros(images, bool),
    )
    shift = np.where(random.random(images) < quality, 0.0, 60.0)
    moved = boxes + np.stack([shift, shift * 0, shift * 0, shift * 0], axis=1)
    return truth, Predictions(truth.image_ids, truth.labels, moved, random.random(images))


def of_class(changes):
    return [change for name, change in changes.items() if name.startswith("AP[")]


def test_a_clear_change_is_sure_and_none_is_not() -> None:
    truth, bad = scene(0.4, 1)
    _, good = scene(0.9, 2)
    better = bootstrap.compare(matched(truth, bad), matched(truth, good), truth.class_names)
    assert better["coco/AP"].verdict == better["AP[cat]"].verdict == "better"
    assert better["coco/AP"].low <= better["coco/AP"].delta <= better["coco/AP"].high
    worse = bootstrap.compare(matched(truth, good), matched(truth, bad), truth.class_names)
    assert worse["coco/AP"].verdict == "worse"
    same = bootstrap.compare(matched(truth, good), matched(truth, good), truth.class_names)
    assert (same["coco/AP"].delta, same["coco/AP"].low, same["coco/AP"].high) == (0, 0, 0)
    assert same["coco/AP"].verdict == same["AP[cat]"].verdict == "not sure"


def test_the_change_lies_in_its_interval_where_samples_are_off() -> None:
    """A few objects of each class among many detections: samples show larger changes than there is."""
    truth, good = synthetic(40, 80, 40)
    _, bad = synthetic(40, 80, 40, seed=1)
    overall = bootstrap.compare(matched(truth, bad), matched(truth, good), truth.class_names)["coco/AP"]
    assert overall.low < overall.delta - 0.02 and overall.delta + 0.02 < overall.high


def of_classes(counts: list[int], qualities: list[float], seed: int) -> tuple[Truth, Predictions]:
    """Each class with one object in that many images, found with that probability among false detections."""
    parts = []
    for place, (count, quality) in enumerate(zip(counts, qualities, strict=True)):
        truth, found = scene(quality, seed + place, images=count)
        random = np.random.default_rng(seed + place)
        wrong = Predictions(truth.image_ids, truth.labels, truth.boxes + 100, random.random(count) * 0.6)
        parts.append((truth, Predictions.join([found, wrong]), np.full(count, place + 1)))
    truths, found, labels = zip(*parts, strict=True)
    columns = (
        np.concatenate([getattr(truth, name) for truth in truths]) for name in ("boxes", "areas", "crowd")
    )
    truth = Truth(
        truths[int(np.argmax(counts))].images,
        [{"id": place + 1, "name": f"c{place}"} for place in range(len(counts))],
        np.concatenate([truth.image_ids for truth in truths]),
        np.concatenate(labels),
        *columns,
    )
    detected = [
        Predictions(one.image_ids, np.full(len(one), place + 1), one.boxes, one.scores)
        for place, one in enumerate(found)
    ]
    return truth, Predictions.join(detected)


def test_classes_with_few_images_are_too_few_to_tell_and_no_interval_leaves_what_can_be() -> None:
    counts, qualities = [1, 2, 5, 9, 10, 60], [0.0, 0.0, 0.2, 0.0, 0.0, 0.1]
    truth, bad = of_classes(counts, qualities, 1)
    _, good = of_classes(counts, [1.0] * 6, 100)
    for pair, verdict in (((bad, good), "better"), ((good, bad), "worse")):
        result = bootstrap.compare(*(matched(truth, one) for one in pair), truth.class_names)
        changes = of_class(result)
        assert [change.verdict for change in changes] == ["too few to tell"] * 4 + [verdict] * 2
        assert all(-1 <= change.low <= change.high <= 1 for change in (*changes, result["coco/AP"]))
    few = of_classes([3], [0.5], 1)
    lone = bootstrap.compare(matched(*few), matched(few[0], of_classes([3], [1.0], 9)[1]), few[0].class_names)
    assert lone["coco/AP"].verdict == lone["coco/AP50"].verdict == "too few to tell"


def test_of_many_equal_classes_none_is_called_better_and_one_that_is_better_is_found() -> None:
    """Sixty classes of equal quality: about three intervals leave out 0 by chance, but no verdict follows."""
    truth, one = of_classes([15] * 60, [0.6] * 60, 1000)
    _, other = of_classes([15] * 60, [0.6] * 59 + [1.0], 3000)
    _, poor = of_classes([15] * 60, [0.6] * 59 + [0.1], 1000)
    equal = of_class(bootstrap.compare(matched(truth, one), matched(truth, other), truth.class_names))
    assert sum(change.low > 0 or change.high < 0 for change in equal[:59]) > 1
    assert [change.verdict for change in equal[:59]] == ["not sure"] * 59
    found = bootstrap.compare(matched(truth, poor), matched(truth, other), truth.class_names)
    assert found["AP[c59]"].verdict == "better"


def test_at_half_is_coco_ap50() -> None:
    for seed in range(30):
        truth, detections = odd_case(seed)
        metrics = coco.evaluate(truth, detections).metrics
        shifted = Predictions(
            detections.image_ids, detections.labels, detections.boxes * 0.9, detections.scores
        )
        result = bootstrap.compare(
            matched(truth, shifted), matched(truth, detections), truth.class_names, samples=2
        )
        for name in ("coco/AP", "coco/AP50"):
            assert (metrics[name] == -1 and not result) or result[name].new == pytest.approx(
                metrics[name], abs=1e-12
            )


@pytest.mark.slow
def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of two detectors of the same quality the interval should miss zero in about 5 % of trials."""
    missed = 0
    for trial in range(100):
        truth, one = scene(0.6, 1000 + trial, images=60)
        _, other = scene(0.6, 5000 + trial, images=60)
        change = bootstrap.compare(matched(truth, one), matched(truth, other), truth.class_names, samples=200)
        missed += change["coco/AP"].verdict != "not sure"
    assert missed <= 14
