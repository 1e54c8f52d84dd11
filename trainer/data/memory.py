"""Memory for pixels on the host, used again and again."""

import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor


class Memory:
    """Gives memory for images, and takes it back when nobody has them any more.

    The system fills fresh memory with zeros first, which takes a twentieth of the time of decoding.
    PyTorch does the same for memory from which a GPU copies.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 of a shape, of any content."""
        size = math.prod(shape)
        whole = self._free.pop() if self._free else np.empty(size, np.uint8)
        if len(whole) < size:
            whole = np.empty(size, np.uint8)
        lent = whole[:size].reshape(shape)
        # All tensors and arrays of these pixels hold `lent`, and it is gone with the last of them.
        weakref.finalize(lent, self._free.append, whole).atexit = False
        return torch.from_numpy(lent)


class Scratch(threading.local):
    """Memory that each thread has for the one image that it draws at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray] = {}

    def __call__(self, use: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3], contiguous, of any content: the same memory for the same use."""
        size = height * width * 3
        if len(self._parts.get(use, ())) < size:
            self._parts[use] = np.empty(size, np.uint8)
        return self._parts[use][:size].reshape(height, width, 3)
