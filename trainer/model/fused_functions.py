"""Functions that torch.compile fuses into one kernel, if a compiler is installed.

Functions decorated with `fused` run uncompiled until `configure` enables compilation, so that inference does
not start the compiler.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LOG = logging.getLogger("compile")
_CONTRACTION_OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast"}
_EXACT_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "off",
    # For GPUs. The first option turns off Triton's fma; its casts to bf16 do not occur here.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}


class _CompileState:
    """State of this process: whether `fused` functions are compiled. Set by `configure`."""

    compiles = False


def configure(enabled: bool, device: torch.device, *, log_result: bool = True) -> bool:
    """Enable or disable compilation of `fused` functions; return whether it is enabled and possible."""
    missing = describe_missing_tool(device.type) if enabled else None
    _CompileState.compiles = enabled and missing is None
    if _CompileState.compiles and device.type == "cuda":
        # torch warns that functions such as pow may differ despite `_EXACT_OPTIONS`; we use none of them.
        warnings.filterwarnings("ignore", message=".*using Triton's bundled libdevice")
    if log_result and missing:
        _LOG.warning(
            "nothing is compiled, so the loss takes several times as long: %s; install it, or set "
            "train.compile=off",
            missing,
        )
    elif log_result and enabled:
        _LOG.info("the first step compiles the loss and takes longer")
    return _CompileState.compiles


def describe_missing_tool(device_type: str) -> str | None:
    """Return what torch.compile lacks for a device; None if it lacks nothing."""
    # On a GPU, Triton also needs a C compiler, for kernel launchers.
    variable, usual = ("CC", ("gcc", "clang")) if device_type == "cuda" else ("CXX", ("g++", "clang++"))
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(shutil.which(name) for name in names):
        return f"there is no compiler ({' or '.join(names)}) on the path"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the compiler needs Python's headers (the package python3-dev)"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def fused(function: _Function, options: dict[str, Any] = _CONTRACTION_OPTIONS) -> _Function:
    """Compile the decorated function if `configure` enabled it. The first argument must be a tensor.

    Shapes are dynamic in every dimension, but torch.compile compiles again for a length of 1, and if the
    first batch had the size of a constant dimension (4 images, as boxes have 4 coordinates). If the compiler
    fails, the function runs uncompiled. Contraction is on: a * b + c may be rounded only once, which saves a
    quarter of the time of the focal loss on a CPU.
    """
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal compiled
        if not _CompileState.compiles:
            return function(*arguments)
        compiled = compiled or with_eager_fallback(
            torch.compile(function, dynamic=True, fullgraph=True, options=options), function
        )
        return compiled(*arguments)

    return call  # type: ignore[return-value]


def fused_exactly(function: _Function) -> _Function:
    """Like `fused`, but with the same bits as the uncompiled function.

    The compiled code has no fused multiply-add, and rounds divisions to nearest on a GPU.
    """
    return fused(function, _EXACT_OPTIONS)


def with_eager_fallback(compiled: Callable[..., Any], function: _Function) -> _Function:
    """Return a function that calls `compiled`, or `function` after a compiler failure.

    A failure is logged and ends the compilation of all `fused` functions.
    """
    failed = False

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal failed
        if failed:
            return function(*arguments)
        # These imports take seconds.
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return compiled(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit, InductorError) as error:
            # No kernel has run yet, so the arguments have not changed.
            # The first line may only name a compiler stage; advice for developers follows a blank line.
            reason = " ".join(str(error).strip().partition("\n\n")[0].splitlines()[:2])
            _LOG.warning("continuing without compilation, because the compiler failed: %s", reason)
            failed, _CompileState.compiles = True, False
            return function(*arguments)

    return call  # type: ignore[return-value]


def compile_for_steps(function: _Function, mode: str, *, fullgraph: bool = False) -> _Function:
    """Compile a function of one tensor with a fixed shape that is called once per forward pass."""
    compiled = with_eager_fallback(
        torch.compile(function, mode=mode, dynamic=False, fullgraph=fullgraph), function
    )

    def run(argument: torch.Tensor) -> Any:
        # From here on, CUDA graphs may overwrite earlier outputs.
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(argument)

    return run  # type: ignore[return-value]
