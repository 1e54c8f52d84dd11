"""What in a step would hold up a GPU, seen on any device."""

import sys
from typing import Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal",
    "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "nms", "bincount", "lift_fresh",
}  # fmt: skip
"""Operations that read a value or a shape back from the device, or (lift_fresh) copy from the host."""
READING = {"tolist", "numpy", "__array__", "__dlpack__", "__repr__", "cpu"}
"""Methods of tensors that read the device; on a CPU's they dispatch no operation."""


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.waiting: list[str] = []
        self._methods = _Methods(self.waiting)

    def __enter__(self) -> Self:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

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


class _Methods(TorchFunctionMode):
    """Notes what of READING is called, and `to` of a CPU by others than torch."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        # torch itself asks for the device where other tensors are, which on a CPU is a CPU.
        ours = not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        if name in READING or (ours and name == "to" and _aims_at_a_cpu(*args[1:], **(kwargs or {}))):
            self._found.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


def _aims_at_a_cpu(*args, device=None, **_) -> bool:
    aims = [aim for aim in (device, *args) if isinstance(aim, (str, torch.device))]
    return any(torch.device(aim).type == "cpu" for aim in aims)


class Arrived:
    """A tensor that has been copied to the host: reading it waits for nothing."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def tolist(self) -> list[float]:
        with torch._C.DisableTorchFunction():
            return self._values.tolist()
