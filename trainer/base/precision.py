"""Mixed precision with the data types that the device supports."""

import logging
import platform
from functools import cache

import torch

_LOG = logging.getLogger("precision")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of the configured precision."""
    dtype = _DTYPES[resolve(device.type, precision)]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@cache
def resolve(device_type: str, precision: str) -> str:
    """Return the precision to use: fp32 instead of bf16 if the device could only emulate bf16."""
    if precision != "bf16":
        return precision
    if device_type == "cpu" and not _cpu_has_bf16():
        _LOG.info("computing in fp32: this CPU has no bf16 instructions")
        return "fp32"
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        _LOG.info("computing in fp32: this GPU has no bf16 instructions; fp16 would be faster on it")
        return "fp32"
    return precision


def _cpu_has_bf16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def grad_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Return a loss scaler, which is only enabled for fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
