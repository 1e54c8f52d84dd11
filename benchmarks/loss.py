"""Compare the training loss with torchvision's, from the heads' outputs to their gradients.

    python -m benchmarks.loss

`focal` is the classification loss with its gradient, `loss` adds matching and box loss.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from benchmarks.common import arguments, random_batch, report, run, stock_model, time_interleaved
from trainer.model.architecture import build
from trainer.model.retinanet.focal import focal_and_gradient_, focal_loss
from trainer.model.retinanet.loss import AnchorTargets, assign_targets, box_loss, pad_targets
from trainer.model.retinanet.options import RetinaNetOptions

GOALS = {
    "cpu": {"focal_91_ratio": 8, "focal_601_ratio": 13, "loss_91_ratio": 2, "loss_601_ratio": 4},
    "cuda": {},
}


class Case:
    """Random head outputs and targets for both losses, with a given number of classes."""

    def __init__(self, classes: int, size: int, images: int, device: torch.device) -> None:
        self.stock = stock_model(classes, size, device)
        self.pixels, self.boxes, self.labels, self.lists = random_batch(images, size, classes, device)
        sides = [-(-size // stride) for stride in (8, 16, 32, 64, 128)]
        detector = build(RetinaNetOptions(), classes).to(device)
        self.anchors = detector.anchors([(side, side) for side in sides], size)
        self.together = torch.cat(self.anchors)
        self.sizes = [len(level) for level in self.anchors]
        self.classes, self.images = classes, images
        # Typical outputs early in training: most scores are near 0.01.
        logits = [torch.randn(images, count, classes, device=device) - 4.6 for count in self.sizes]
        self.own_logits = [level.flatten(0, 1).clone() for level in logits]
        self.logits = [level.requires_grad_() for level in logits]
        self.stock_logits = torch.cat(logits, dim=1).detach().requires_grad_()
        self.offsets = (torch.randn(images, sum(self.sizes), 4, device=device) * 0.1).requires_grad_()

    def stock_focal(self) -> None:
        matched = self.matched_lists
        head = self.stock.head.classification_head
        head.compute_loss(self.lists, {"cls_logits": self.stock_logits}, matched).backward()
        self.stock_logits.grad = None

    def focal(self) -> None:
        # The gradient overwrites the logits; the time does not depend on their values.
        for level, names, factors in zip(self.own_logits, *self._by_level(self.matches), strict=True):
            focal_and_gradient_(level, names, factors)

    def stock_loss(self) -> None:
        outputs = {"cls_logits": self.stock_logits, "bbox_regression": self.offsets}
        losses = self.stock.compute_loss(self.lists, outputs, [self.together] * self.images)
        sum(losses.values()).backward()
        self.stock_logits.grad = self.offsets.grad = None

    def loss(self) -> None:
        matches = assign_targets(*pad_targets(self.boxes, self.labels), self.together)
        (self._focal(matches) + box_loss(self.offsets, "giou", self.together, matches)).backward()
        self.offsets.grad = None
        for level in self.logits:
            level.grad = None

    def prepare(self) -> None:
        """Match once for the candidates that compute only the classification loss."""
        self.matches = assign_targets(*pad_targets(self.boxes, self.labels), self.together)
        matcher = self.stock.proposal_matcher
        self.matched_lists = [matcher(box_iou(target["boxes"], self.together)) for target in self.lists]

    def _focal(self, matches: AnchorTargets) -> Tensor:
        parts = [
            focal_loss(level.flatten(0, 1), names, factors)
            for level, names, factors in zip(self.logits, *self._by_level(matches), strict=True)
        ]
        return torch.stack(parts).sum()

    def _by_level(self, matches: AnchorTargets) -> tuple[list[Tensor], list[Tensor]]:
        labels, weights = (part.split(self.sizes, dim=1) for part in (matches.labels, matches.weights))
        return [part.flatten() for part in labels], [part.flatten() for part in weights]


def main() -> None:
    """Measure at 91 and 601 classes and print the ratios."""
    options = arguments(__doc__, trains=True, size=256, images=2)
    figures: dict[str, Any] = {}
    for classes in (91, 601):
        case = Case(classes, options.size, options.images, options.device)
        case.prepare()
        for part in ("focal", "loss"):
            candidates = {"stock": getattr(case, f"stock_{part}"), "ours": getattr(case, part)}
            seconds = time_interleaved(candidates, options.rounds, options.device, options.clock)
            for name, value in seconds.items():
                figures[f"{part}_{classes}_{name}_s"] = value
            figures[f"{part}_{classes}_ratio"] = seconds["stock"] / seconds["ours"]
    report("loss", figures["loss_601_ratio"], figures, options, at_least=GOALS[options.device.type])


if __name__ == "__main__":
    sys.exit(run(main))
