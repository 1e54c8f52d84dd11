"""Compare postprocessing with torchvision's, from the heads' outputs to detections.

    python -m benchmarks.postprocess

Also counts the images with different detections (labels, scores, or boxes by more than 0.01 px).
"""

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, report, run, stock_model, time_interleaved
from trainer.model.architecture import Detections, build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.model.retinanet.postprocess import postprocess

GOALS = {"cpu": {"ratio_601": 5}, "cuda": {}}  # at 800 px


def random_outputs(
    images: int, counts: list[int], classes: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random logits and offsets of each level; a few classes have high scores at some anchors."""
    logits = []
    for count in counts:
        objects = torch.rand(images, count, 1, device=device) < 0.02
        level = torch.randn(images, count, classes, device=device) - 7
        logits.append(level.add_(objects * 6 * torch.rand(images, count, 1, device=device)))
    return logits, [torch.randn(images, count, 4, device=device) * 0.2 for count in counts]


def count_differences(detections: Detections, expected: list[dict[str, Tensor]]) -> int:
    """Return the number of images with different detections."""
    count = 0
    for row, reference in enumerate(expected):
        rows = len(reference["scores"])
        same = (
            int(detections.num[row]) == rows
            and torch.equal(detections.labels[row, :rows], reference["labels"])
            and torch.allclose(detections.scores[row, :rows], reference["scores"], rtol=1e-5)
            and torch.allclose(detections.boxes[row, :rows], reference["boxes"], atol=0.01)
        )
        count += not same
    return count


def main() -> None:
    """Measure at 91 and 601 classes and print the ratios."""
    options = arguments(__doc__, size=800, images=2)
    size, device = options.size, options.device
    figures: dict[str, Any] = {}
    for classes in (91, 601):
        stock = stock_model(classes, size, device).eval()
        stock.detections_per_img = 100
        detector = build(RetinaNetOptions(detections_per_image=100), classes).to(device)
        sides = [-(-size // stride) for stride in (8, 16, 32, 64, 128)]
        anchors = detector.anchors([(side, side) for side in sides], size)
        logits, offsets = random_outputs(options.images, [len(level) for level in anchors], classes, device)
        both = {"cls_logits": logits, "bbox_regression": offsets}
        # [B, n, C] -> [B, A, C, h * w], as the convolution returns them.
        levels = [
            level.unflatten(1, (-1, detector.anchors_per_location)).permute(0, 2, 3, 1).contiguous()
            for level in logits
        ]
        heads = levels, torch.cat(offsets, dim=1), torch.cat(anchors), size
        shapes = [(size, size)] * options.images

        @torch.inference_mode()
        def run_torchvision(stock=stock, both=both, anchors=anchors, shapes=shapes) -> Any:
            return stock.postprocess_detections(both, [anchors] * len(shapes), shapes)

        @torch.inference_mode()
        def run_kubedet(detector=detector, heads=heads) -> Detections:
            candidates = detector.select_candidates(*heads)
            return postprocess(*candidates, detector.num_classes, size, detector.config)

        seconds = time_interleaved(
            {"stock": run_torchvision, "ours": run_kubedet}, options.rounds, device, options.clock
        )
        expected = run_torchvision()
        figures[f"stock_{classes}_s"], figures[f"ours_{classes}_s"] = seconds["stock"], seconds["ours"]
        figures[f"ratio_{classes}"] = seconds["stock"] / seconds["ours"]
        figures[f"detections_{classes}"] = sum(len(image["scores"]) for image in expected)
        figures[f"differing_images_{classes}"] = count_differences(run_kubedet(), expected)
    report(
        "postprocess",
        figures["ratio_601"],
        figures,
        options,
        at_least=GOALS[device.type] if size == 800 else {},
        at_most={"differing_images_91": 0, "differing_images_601": 0},
    )


if __name__ == "__main__":
    sys.exit(run(main))
