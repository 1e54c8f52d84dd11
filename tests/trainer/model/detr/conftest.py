"""What the tests of D-FINE and RT-DETRv2 share: narrow networks and a batch with targets."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

from trainer.model.architecture import build
from trainer.model.deimv2.options import Deimv2Options
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.global_batch import BatchContext, random_keys
from trainer.model.rfdetr.options import RFDetrOptions

NARROW = {
    "dfine": DFineOptions(size="n", width=0.25, queries=30, denoising=20),
    "rtdetr": RTDetrOptions(size="r18", width=0.25, queries=30, denoising=20),
    "rfdetr": RFDetrOptions(size="nano", width=0.25, queries=30, groups=3),
    "deimv2": Deimv2Options(size="n", width=0.25, queries=30, denoising=20),
}
SIZE, CLASSES = 128, 3


@pytest.fixture
def network():
    """Build a narrow network whose weights are far from where they began, and which tells images apart."""

    def make(architecture, **options):
        torch.manual_seed(0)
        detector = build(replace(NARROW[architecture], **options), CLASSES)
        for parameter in detector.parameters():
            if parameter.requires_grad:
                parameter.data += 0.02 * torch.randn_like(parameter)
        norms = [module for module in detector.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
        # Statistics of some images: with those of none the features of all places are the same.
        with torch.no_grad():
            detector.train().outputs(torch.rand(4, 3, SIZE, SIZE), None)
        for norm in norms:
            norm.momentum = 0.1
        return detector

    return make


class Sample(NamedTuple):
    """A batch as the loader makes it."""

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    counts: list[int]

    def context(self, rows=slice(None), step=7):
        """What some of its images are of the whole."""
        ids = list(range(len(self.counts)))[rows]
        keys = random_keys(0, step, ids, torch.device("cpu"))
        return BatchContext(keys, self.counts[rows], sum(self.counts), max(self.counts), len(self.counts))

    def centered(self):
        """Center and size of the boxes, relative to the image, fp64."""
        low, high = self.boxes[..., :2].double(), self.boxes[..., 2:].double()
        return torch.cat([(low + high) / 2, high - low], dim=-1) / SIZE


@pytest.fixture
def batch():
    """Make a batch whose images have so many targets."""

    def make(counts):
        draw = torch.Generator().manual_seed(1)
        rows = max(1, *counts)
        shape = (len(counts), 3, SIZE, SIZE)
        images = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        corner = torch.rand(len(counts), rows, 2, generator=draw) * 80
        side = torch.rand(len(counts), rows, 2, generator=draw) * 40 + 6
        boxes = torch.cat([corner, corner + side], dim=-1)
        labels = torch.randint(0, CLASSES, (len(counts), rows), generator=draw)
        for row, count in enumerate(counts):
            labels[row, count:], boxes[row, count:] = -1, 0
        return Sample(images, boxes, labels, counts)

    return make
