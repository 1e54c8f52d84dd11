"""Counts what a training step launches, and how often its host needs values of the device, on any device."""

from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view",
    "_reshape_alias", "empty", "empty_like", "promote_types",
}  # fmt: skip
"""Operators that launch nothing."""
_WAITS = dict.fromkeys(
    ("_local_scalar_dense", "equal", "masked_select", "nms", "nonzero", "_unique2", "unique_dim"), 1
) | {"nms_keep": 2}
"""Waits of operators whose results, or their shapes, depend on values; ours looks for candidates first."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
"""Functions that read all values of a tensor; on a CPU they dispatch no operator."""


class Operators:
    """Counts while it is entered.

    A tensor of the host counts like one of the device: the waits are at most those counted.
    """

    def __init__(self) -> None:
        self.operators = 0  # That launch work: views do not count.
        self.waits = 0  # Times that the host needs values.
        self._modes = (_Dispatched(self), _Called(self))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Dispatched(TorchDispatchMode):
    def __init__(self, counted: Operators) -> None:
        super().__init__()
        self._counted = counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch 2.12 and later call compiled functions, which they refuse in other modes."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        self._counted.operators += name not in _VIEWS
        masks = name in _INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self._counted.waits += _WAITS.get(name, 0) + masks
        return function(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, counted: Operators) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counted.waits += function in _READING
        return function(*args, **(kwargs or {}))
