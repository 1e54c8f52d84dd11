"""Reusable buffers for pixels on the host."""

import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor


class Memory:
    """A pool of buffers for images; a buffer returns to it when nobody references the images any more.

    The system fills fresh memory with zeros first, which takes a twentieth of the time of decoding.
    PyTorch pools pinned memory the same way.
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
        # All tensors and arrays of these pixels reference `lent`, which is finalised with the last of them.
        weakref.finalize(lent, self._free.append, whole).atexit = False
        return torch.from_numpy(lent)


class Scratch(threading.local):
    """A buffer for each thread, for the one image that it draws at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray] = {}

    def __call__(self, use: str, height: int, width: int) -> np.ndarray:
        """Return uint8 [height, width, 3], contiguous, of any content: the same memory for the same use."""
        size = height * width * 3
        if len(self._parts.get(use, ())) < size:
            self._parts[use] = np.empty(size, np.uint8)
        return self._parts[use][:size].reshape(height, width, 3)
