"""Compare a training step of D-FINE or RT-DETRv2 with transformers' network in a plain loop.

    python -m benchmarks.detr_step --clock cpu
    python -m benchmarks.detr_step --cases 80:640:dfine_s,80:640:dfine_l --images 16 --network graphs

`benchmarks.step` explains the cases and figures: times, operators and waits of a step, and ratios. The goal
is for `ratio_to_bf16`.
"""

import sys
from typing import Any

import torch

from benchmarks.common import run
from benchmarks.step import Reference, compare
from trainer.model.architecture import build
from trainer.model.boxes import to_center
from trainer.model.dfine.options import DFineOptions, RTDetrOptions

GOALS = {"cpu": {"ratio_to_bf16_80_320px_dfine_s": 1.3, "ratio_to_bf16_80_320px_dfine_l": 1.3}}
_CLIP = 0.1  # Largest gradient norm when the authors train D-FINE and RT-DETR.


def transformers(batch: Any, config: DFineOptions | RTDetrOptions, classes: int) -> Reference:
    """Return the model of transformers and its loss, with the same weights frozen as in ours."""
    pixels, boxes, labels, _ = batch
    ours = build(config, classes)
    model = ours.upstream(ours.library_config)
    frozen = {name for name, weight in ours.named_parameters() if not weight.requires_grad}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    model = model.to(pixels.device).train()
    pairs = zip(labels, to_center(boxes / pixels.shape[-1]), strict=True)
    targets = [{"class_labels": names, "boxes": rows} for names, rows in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return Reference(model, lambda: model(pixel_values=pixels / 255, labels=targets).loss, optimizer, _CLIP)


def main() -> None:
    """Measure every case and print the ratios."""
    compare(
        "detr_step",
        __doc__,
        "80:320:dfine_s,80:320:dfine_l",
        transformers,
        (DFineOptions, RTDetrOptions),
        GOALS,
    )


if __name__ == "__main__":
    sys.exit(run(main))
