"""What a training holds beside activations: parameters, gradients, optimiser state, moving average.

    python -m benchmarks.state

Sizes are counted on the recipes' own models and optimisers after one step with gradients of zero,
in megabytes (10^6 bytes); an average of the weights is counted whether the recipe keeps one or not.
"""

import torch

from benchmarks.common import arguments, report
from trainer.model import recipes
from trainer.model.architecture import build
from trainer.training.optim import build_optimizer

CASES = {"openimages_r50": 600, "mlperf": 264, "coco_r50": 80}
"""Recipes and their classes."""
ACTIVATIONS_MB = 865.0
"""What an image keeps for the backward pass at 601 classes, 800 px: tests/trainer/model/test_memory.py."""


def sizes(recipe: str, classes: int) -> dict[str, float]:
    """Count one recipe.

    Args:
        recipe: its name.
        classes: classes of its data.

    Returns:
        Megabytes of each part, and of all.
    """
    config = recipes.load(recipe)
    detector = build(config.model, classes)
    optimizer = build_optimizer(detector, config.train)
    trained = [value for value in detector.parameters() if value.requires_grad]
    for value in trained:
        value.grad = torch.zeros_like(value)
    optimizer.step()
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    figures = {
        "parameters": _megabytes(list(detector.parameters())),
        "gradients": _megabytes([value.grad for value in trained if value.grad is not None]),
        "optimizer": _megabytes(tensors),
        "average": _megabytes(list(detector.state_dict().values())),
    }
    return {**figures, "all": round(sum(figures.values()), 1)}


def _megabytes(tensors: list[torch.Tensor]) -> float:
    return round(sum(value.numel() * value.element_size() for value in tensors) / 1e6, 1)


def main() -> None:
    """Count all of CASES; the ratio is the largest state against an image's activations."""
    options = arguments("state")
    sizes_of_case = {recipe: sizes(recipe, classes) for recipe, classes in CASES.items()}
    figures = {
        f"{recipe}_{part}_mb": size
        for recipe, all_of in sizes_of_case.items()
        for part, size in all_of.items()
    }
    report(
        "state", max(all_of["all"] for all_of in sizes_of_case.values()) / ACTIVATIONS_MB, figures, options
    )


if __name__ == "__main__":
    main()
