"""Random images with targets, in the forms of both sides of a comparison."""

import torch
from torch import Tensor

from trainer.data.batch import PADDING


def random_batch(
    counts: list[int], size: int, classes: int
) -> tuple[Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
    """Squares of `size` pixels with so many boxes each, as a padded batch and as torchvision takes them."""
    images = torch.randint(0, 256, (len(counts), 3, size, size), dtype=torch.uint8)
    boxes = torch.zeros(len(counts), max(1, *counts), 4)
    labels = torch.full(boxes.shape[:2], PADDING)
    lists = []
    for row, count in enumerate(counts):
        corner = torch.rand(count, 2) * size * 0.6
        boxes[row, :count] = torch.cat([corner, corner + 4 + torch.rand(count, 2) * size * 0.35], dim=1)
        labels[row, :count] = torch.randint(0, classes, (count,))
        lists.append({"boxes": boxes[row, :count], "labels": labels[row, :count]})
    return images, boxes, labels, lists
