"""What a training step keeps for its backward pass, at full size, counted without computing anything."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.config import ModelConfig
from trainer.model.detector import build

LIMIT = 1.1e9
"""Bytes an image, in bf16 at 800x800."""


def kept(classes, images):
    """Bytes that the forward pass of a batch keeps, parameters not counted."""
    held = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            held[storage._cdata] = storage  # held, so that no other gets its place
        return tensor

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        detector = build(ModelConfig(), classes).train()
        pixels = torch.zeros(images, 3, 800, 800, dtype=torch.uint8)
        boxes, labels = torch.rand(images, 8, 4), torch.zeros(images, 8, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            losses = detector(pixels, boxes, labels)
        assert losses.classification.requires_grad
    return sum(storage.nbytes() for storage in held.values())


def an_image(classes):
    """What one more image adds to a batch."""
    return (kept(classes, 4) - kept(classes, 2)) / 2


def test_an_image_costs_at_most_what_is_said_whatever_the_classes():
    few, many = an_image(91), an_image(601)
    assert 0.5e9 < many < LIMIT
    # No logits are kept: 5400 of them at each place would be another sixth.
    assert many < few * 1.01
