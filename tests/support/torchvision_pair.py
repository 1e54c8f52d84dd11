"""A detector of ours beside torchvision's with the same weights: same input, gradients and detections."""

import torch

from trainer.export.verify import Comparison, Tolerance
from trainer.model.architecture import Detections


def same_input(monkeypatch, ours, stock, images):
    """Give both the same network input: fifty random layers blow its last bit up a thousandfold."""
    theirs, _ = stock.transform([image / 255 for image in images])
    assert torch.allclose(ours.normalize(images), theirs.tensors, atol=1e-5)
    monkeypatch.setattr(ours, "normalize", lambda images, color=None: theirs.tensors)


def in_training(pair):
    """Both in training, but for the statistics of their BatchNorm: over a 1x1 map they blow rounding up."""
    for model in pair:
        for module in model.train().modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    return pair


def assert_same_losses(ours, stock, losses, expected, names, gradients=1e-4):
    assert set(losses) == set(ours.loss_names) == set(names)
    for name, loss in losses.items():
        assert torch.allclose(loss, expected[names[name]], rtol=1e-5), name
    sum(expected.values()).backward()
    sum(losses.values()).backward()
    # In fp32: rounding differs from processor to processor.
    theirs = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)
        assert difference < gradients, name


def assert_same_detections(monkeypatch, ours, stock, images, first):
    same_input(monkeypatch, ours, stock, images)
    with torch.no_grad():
        expected = stock([image / 255 for image in images])
    detections = ours.predict(images)
    assert detections.num.tolist() == [len(one["scores"]) for one in expected] and detections.num.min() > 10
    comparison = Comparison(Tolerance(iou=0.999, score=1e-6, binding=True))
    for row, one in enumerate(expected):
        rows = one["boxes"][None], one["scores"][None], one["labels"][None] - first
        theirs = Detections(*rows, detections.num[row : row + 1])
        comparison.add(Detections(*(part[row : row + 1] for part in detections)), theirs)
    result = comparison.result()
    assert result.matched == 1 and result.box_error < 1e-4
