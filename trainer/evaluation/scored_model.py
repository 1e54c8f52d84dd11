"""A model that is ready to be scored, whatever it was loaded from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.model.postprocess import Detections


@dataclass(frozen=True)
class ScoredModel:
    """A model, and what is known of it."""

    uri: str
    predict: Callable[[Tensor], Detections]
    """Detections in uint8 squares [B, 3, S, S]."""
    reentrant: bool
    """Whether several threads may call it at once."""
    categories: list[dict[str, Any]]
    """Classes in the order of its labels."""
    image_size: int
    """S, pixels."""
    sha256: str
    """Of the file."""
    step: int | None
    """Optimiser steps it was trained for."""
    config: dict[str, Any]
    """Configuration of its training."""
