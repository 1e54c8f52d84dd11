"""Counts the operators that a training step launches, and its waits for values from the device."""

from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view",
    "_reshape_alias", "empty", "empty_like", "promote_types",
}  # fmt: skip
"""Operators that launch no kernel."""
_WAITS = dict.fromkeys(
    ("_local_scalar_dense", "equal", "masked_select", "nms", "nonzero", "_unique2", "unique_dim"), 1
) | {"nms_keep": 2}
"""Waits of operators whose results or shapes depend on values; `nms_keep` first counts its candidates."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_READ_FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
"""Functions that read all values of a tensor; on a CPU they dispatch no operator."""


class OperatorCounter:
    """Context manager that counts operators and waits.

    Tensors on the host count like those on the device, so the count is an upper limit.
    """

    def __init__(self) -> None:
        self.operators = 0  # Without views, which launch no kernel.
        self.waits = 0  # Times that the host waits for values.
        self._modes = (_DispatchCounter(self), _FunctionCounter(self))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _DispatchCounter(TorchDispatchMode):
    def __init__(self, counted: OperatorCounter) -> None:
        super().__init__()
        self._counted = counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled functions, which torch 2.12 and later refuse in other modes."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        self._counted.operators += name not in _VIEWS
        masks = name in _INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self._counted.waits += _WAITS.get(name, 0) + masks
        return function(*args, **(kwargs or {}))


class _FunctionCounter(TorchFunctionMode):
    def __init__(self, counted: OperatorCounter) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counted.waits += function in _READ_FUNCTIONS
        return function(*args, **(kwargs or {}))
