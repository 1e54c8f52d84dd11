"""Mixed precision: which arithmetic a device really has."""

import logging
import platform
from functools import cache

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context that runs convolutions in the configured precision on a device."""
    dtype = _DTYPES[effective(device.type, precision)]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@cache
def effective(device_type: str, precision: str) -> str:
    """The precision that is used: bf16 becomes fp32 on a CPU without bf16 instructions.

    Without them each bf16 convolution converts to fp32 and back and is slower than fp32.
    """
    if device_type == "cpu" and precision == "bf16" and not _cpu_has_bf16():
        logging.getLogger("precision").warning("this CPU has no bf16 instructions: computing in fp32")
        return "fp32"
    return precision


def _cpu_has_bf16() -> bool:
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """The loss scaler; it does nothing unless the precision is fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
