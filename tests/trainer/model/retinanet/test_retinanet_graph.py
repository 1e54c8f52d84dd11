"""The deployment graph in PyTorch: it finds what the detector finds."""

import pytest
import torch

from trainer.export.formats import to_detections
from trainer.export.verify import EXACT, DetectionComparison
from trainer.model.architecture import Detections, build
from trainer.model.retinanet import retinanet
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.postprocess import nms_keep

SIZE = 96


def _detector(**changes):
    torch.manual_seed(0)
    config = RetinaNetOptions(
        backbone="resnet18",
        backbone_width=8,
        fpn_channels=16,
        head_depth=1,
        score_threshold=0.0,
        anchor_sizes=[8.0, 16.0, 32.0, 48.0, 64.0],
        **changes,
    )
    detector = build(config, 7).eval()
    with torch.no_grad():  # Scores apart from each other, as of a trained model.
        torch.nn.init.normal_(detector.head.classification_head.cls_logits.weight, std=0.3)
    return detector


def _images(count=3):
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8)


@pytest.mark.parametrize(
    "changes",
    [{}, {"version": "v1"}, {"nms_threshold": 0.2}],
    ids=str,
)
def test_it_equals_the_detector(changes):
    detector, images = _detector(**changes), _images()
    with torch.inference_mode():
        boxes, scores, labels, num = detector.deployment_graph(SIZE)(images)
    expected = detector.predict(images)
    assert torch.equal(num, expected.num) and int(num.min()) > 5
    assert torch.equal(labels, expected.labels)
    assert torch.allclose(scores, expected.scores, atol=1e-6)
    assert torch.allclose(boxes, expected.boxes, atol=1e-3)


def test_outputs_have_the_rows_there_can_be(monkeypatch):
    monkeypatch.setattr(retinanet, "_MAX_CANDIDATES", 3)
    detector = _detector(detections_per_image=100000)
    graph = detector.deployment_graph(SIZE)
    with torch.inference_mode():
        boxes, scores, labels, num = graph(_images(2))
    assert graph.rows == 15 and boxes.shape == (2, 15, 4) and num.shape == (2,)
    assert ((labels == -1) == (scores == 0)).all()


def test_raw_outputs_and_their_suppression_find_the_same():
    detector, images = _detector(), _images()
    with torch.inference_mode():
        boxes, scores = detector.raw_graph(SIZE)(images)
    assert scores.shape == (3, boxes.shape[1], 7)
    comparison = DetectionComparison(EXACT)
    comparison.add(detector.predict(images), to_detections(boxes, scores, detector.thresholds))
    assert comparison.result().matched > 0.99


def test_suppression_is_within_a_class():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 9.5], [50, 50, 60, 60]]])
    kept = nms_keep(boxes, torch.tensor([[0.9, 0.8, 0.7, 0.01]]), torch.tensor([[0, 1, 0, 0]]), 2, 0.5, 0.05)
    assert kept.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_partners_are_found_by_label_box_and_score_not_by_rank():
    def detections(rows):
        boxes, scores, labels = zip(*rows, strict=True)
        return Detections(
            torch.tensor([boxes]), torch.tensor([scores]), torch.tensor([labels]), torch.tensor([len(rows)])
        )

    def share(first, second):
        comparison = DetectionComparison(EXACT)
        comparison.add(detections(first), detections(second))
        return comparison.result().matched

    one = ([0.0, 0, 10, 10], 0.9, 1), ([20.0, 20, 40, 40], 0.9, 2)
    assert share(one, one[::-1]) == 1.0
    assert share(one, [one[0], ([20.0, 20, 40, 40], 0.9, 3)]) == 0.5
    assert share(one, [one[0], ([20.0, 20, 40, 44], 0.9, 2)]) == 0.5
    assert share(one, [one[0], ([20.0, 20, 40, 40], 0.8, 2)]) == 0.5
    assert share(one, one[:1]) == pytest.approx(2 / 3)
