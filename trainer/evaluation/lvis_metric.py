"""The metrics of LVIS (https://www.lvisdataset.org), whose images are annotated for some classes only.

A detection counts only if its class is verified in its image: it has boxes there, or people found none
(`neg_category_ids`). Where they did not box all objects of a class (`not_exhaustive_category_ids`),
detections without a partner are ignored. Of an image the 300 best detections count, whatever their class.
Equal to lvis 0.5.3 (github.com/lvis-dataset/lvis-api, lvis/eval.py), for which a crowd is an object, and
which leaves out boxes without an area.
"""

from dataclasses import replace

import numpy as np

from trainer.evaluation import engines
from trainer.evaluation.metrics import LVIS
from trainer.evaluation.truth_and_predictions import Predictions, Truth

MAX_DETECTIONS = 300  # detections of an image
_VERIFIED = ("neg_category_ids", "not_exhaustive_category_ids")
_FREQUENCIES = ("r", "c", "f")  # values of a category's frequency, in the order of the metrics


def evaluate(truth: Truth, predictions: Predictions) -> dict[str, float]:
    """Return the metrics by name, -1 without ground truth; {} if the images are not annotated as LVIS's."""
    if not all(key in image for image in truth.images for key in _VERIFIED):
        return {}
    truth = truth.take(truth.areas > 0)
    truth = replace(truth, crowd=np.zeros_like(truth.crowd))
    best = np.lexsort((-predictions.scores, predictions.image_ids))
    images = predictions.image_ids[best]
    rank = np.arange(len(best)) - np.searchsorted(images, images)
    predictions = predictions.take(np.sort(best[rank < MAX_DETECTIONS]))
    predictions = predictions.take(predictions.boxes[:, 2] * predictions.boxes[:, 3] > 0)
    precision, recall = (part[..., -1] for part in engines.lvis(truth, predictions))
    of_class = [category.get("frequency") for category in truth.categories]
    groups = [np.array([one == name for one in of_class], bool) for name in _FREQUENCIES]
    values = engines.precisions(precision)
    values += [engines.mean(precision[:, :, group, 0]) for group in groups]
    values += [engines.mean(recall[..., size]) for size in (0, 1, 2, 3)]
    return dict(zip(LVIS, values, strict=True))
