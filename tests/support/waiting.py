"""What in a step would hold up a GPU, seen from the operations that are dispatched on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal",
    "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "nms", "bincount", "lift_fresh",
}  # fmt: skip
"""Operations that read a value or a shape back from the device, or (lift_fresh) copy from the host."""


class Counter(TorchDispatchMode):
    """Counts operations, and those that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.operations, self.waiting = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func._schema.name.split("::")[1]
        indices = args[1] if name.startswith(("index", "_index", "_unsafe_index")) and len(args) > 1 else ()
        masks = isinstance(indices, (list, tuple)) and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices
        )
        if name in WAITING or masks:
            self.waiting.append(str(func))
        return func(*args, **(kwargs or {}))
