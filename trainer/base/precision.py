"""Mixed precision: which arithmetic a device really has."""

import logging
import platform
from functools import cache

import torch

_LOG = logging.getLogger("precision")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context that runs convolutions in the configured precision on a device."""
    dtype = _DTYPES[effective(device.type, precision)]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@cache
def effective(device_type: str, precision: str) -> str:
    """The precision that is used: bf16 becomes fp32 where the processor has no instructions for it.

    Without them each bf16 convolution converts to fp32 and back and is slower than fp32.
    """
    if precision != "bf16":
        return precision
    # No warning: nothing is wrong, and every process on a machine logs warnings.
    if device_type == "cpu" and not _cpu_has_bf16():
        _LOG.info("computing in fp32: this CPU has no bf16 instructions")
        return "fp32"
    # PyTorch's default answer includes emulation.
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        _LOG.info("computing in fp32: this GPU has no bf16 instructions; fp16 would be faster on it")
        return "fp32"
    return precision


def _cpu_has_bf16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """The loss scaler; it does nothing unless the precision is fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
