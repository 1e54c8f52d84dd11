"""All that is found out about predictions, at once."""

import numpy as np
import pytest

from tests.trainer.evaluation.test_engines import odd_case
from trainer.base.errors import EvaluationError
from trainer.evaluation import analysis, engines, scoring
from trainer.evaluation.truth_and_predictions import Predictions

SEED = 0


def test_both_evaluators_give_the_same_but_what_only_one_finds() -> None:
    truth, detections = odd_case(SEED)
    dataset = {"images": truth.images}
    ours = scoring.score(dataset, truth, detections, "hotcoco")
    oracle = scoring.score(dataset, truth, detections, "pycocotools")
    assert ours.metrics == pytest.approx(oracle.metrics, abs=1e-12) and len(ours.metrics) == 13
    assert ours.points == oracle.points
    assert ours.tide is not None and ours.confusion is not None
    assert oracle.tide is None and oracle.confusion is None


def test_confusions_are_those_of_what_the_gallery_shows() -> None:
    truth, detections = odd_case(SEED)
    ours = scoring.score({"images": truth.images}, truth, detections, "hotcoco").confusion
    shown = detections.take(detections.scores >= analysis.SHOWN_SCORE)
    assert ours is not None and 0 < len(shown) < len(detections)
    expected = analysis.confusion(engines.evaluator(truth, shown), score=0.0)
    assert ours.names == expected.names and ours.counts.tolist() == expected.counts.tolist()


def test_labels_that_people_verified_count_for_open_images_only() -> None:
    truth, detections = odd_case(SEED)
    verified = {"images": [{**image, "verified": []} for image in truth.images]}
    plain = scoring.score({"images": truth.images}, truth, detections, "hotcoco")
    filtered = scoring.score(verified, truth, detections, "hotcoco")
    assert filtered.coco.metrics == plain.coco.metrics
    assert filtered.metrics[scoring.OPEN_IMAGES] > plain.metrics[scoring.OPEN_IMAGES]


def test_a_baseline_of_other_images_is_refused_with_examples() -> None:
    truth, detections = odd_case(SEED)
    scores = scoring.score({"images": truth.images}, truth, detections, "hotcoco")
    other = Predictions(
        detections.image_ids + 100_000, detections.labels, detections.boxes, detections.scores
    )
    with pytest.raises(EvaluationError, match=f"{len(detections)} with an unknown image id: 100"):
        scoring.changes(truth, other, scores, samples=5)


def test_a_model_against_itself_has_not_changed() -> None:
    truth, detections = odd_case(SEED)
    scores = scoring.score({"images": truth.images}, truth, detections, "hotcoco")
    changes = scoring.changes(truth, detections, scores, samples=20)
    assert changes["coco/AP"].new == pytest.approx(scores.metrics["coco/AP"], abs=1e-12)
    assert changes["coco/AP50"].new == pytest.approx(scores.metrics["coco/AP50"], abs=1e-12)
    assert np.array([[c.delta, c.low, c.high] for c in changes.values()]).any() == 0
