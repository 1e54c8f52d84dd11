"""A detector of our own making, to show what another one takes: this file, and a line in the register."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import nn

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, Positive
from trainer.data.batch import PADDING
from trainer.model.architecture import RAW_OUTPUTS, Architecture, Detections, Graph, UpstreamWeights
from trainer.model.weights import load_tensors


@dataclass(config=STRICT, frozen=True)
class ToyOptions(ModelConfig):
    stride: ClassVar[int] = 16
    architecture: Literal["toy"] = "toy"
    width: Positive = 8
    """Channels."""


class Toy(Architecture):
    """Each place of a grid finds at most one object, whose center is in it."""

    loss_names = ("objects", "boxes")
    title = "a toy"

    def __init__(self, config, num_classes):
        super().__init__(config, num_classes)
        self.body = nn.Conv2d(3, config.width, 16, 16)
        self.head = nn.Conv2d(config.width, num_classes + 4, 1)

    def cells(self, images):
        cells = self.head(F.relu(self.body(images.float() / 255))).float().flatten(2).transpose(1, 2)
        logits, corner, side = cells.split([self.num_classes, 2, 2], dim=2)
        return logits, torch.cat([corner, corner + F.softplus(side)], dim=2)

    def forward(self, images, boxes, labels, color=None):
        logits, predicted = self.cells(images)
        image, row = (labels != PADDING).nonzero(as_tuple=True)
        column, line = ((boxes[image, row, :2] + boxes[image, row, 2:]) / 32).long().unbind(1)
        place = line * (images.shape[3] // 16) + column
        target = torch.zeros_like(logits)
        target[image, place, labels[image, row]] = 1.0
        boxes_loss = F.l1_loss(predicted[image, place], boxes[image, row] / 16)
        return {"objects": F.binary_cross_entropy_with_logits(logits, target), "boxes": boxes_loss}

    @torch.no_grad()
    def predict(self, images):
        return Detections(*ToyGraph(self, images.shape[-1])(images))

    def deployment_graph(self, image_size):
        return ToyGraph(self, image_size)

    def raw_graph(self, image_size):
        return RawToyGraph(self, image_size)

    def load_upstream(self, state, source):
        return load_tensors(self, state, source, (), body="body.")

    def upstream_weights(self, class_names):
        return UpstreamWeights(self.state_dict(), self.num_classes)


class ToyGraph(Graph):
    def __init__(self, toy, image_size):
        super().__init__()
        self.toy, self.image_size = toy, image_size
        self.rows = min(toy.config.detections_per_image, (image_size // 16) ** 2)

    def forward(self, images):
        logits, boxes = self.toy.cells(images)
        scores, labels = logits.sigmoid().max(dim=2)
        scores, best = scores.topk(self.rows, dim=1)
        real = scores > self.toy.config.score_threshold
        boxes = (boxes * 16).clamp(0, self.image_size).gather(1, best[:, :, None].expand(-1, -1, 4))
        classes = torch.where(real, labels.gather(1, best), -1)
        return boxes * real[:, :, None], scores * real, classes, real.sum(dim=1)


class RawToyGraph(ToyGraph):
    output_names = RAW_OUTPUTS

    def forward(self, images):
        logits, boxes = self.toy.cells(images)
        return (boxes * 16).clamp(0, self.image_size), logits.sigmoid()
