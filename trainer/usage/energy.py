"""Energy as the machine measures it: RAPL's counters of the processors, NVML's of NVIDIA's GPUs.

Both are of a whole processor or GPU, whoever computes on it. Nothing here raises: what cannot be read is
None, which is not 0. RAPL is readable for root alone on most machines, and hidden in most containers.
"""

import ctypes
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("usage")

POWERCAP = Path("/sys/class/powercap")
DEVICES = Path("/dev")

_COUNTED = ("package", "dram")
"""Zones of RAPL that are counted, by the begin of their names: the others (core, uncore, psys) are parts of
these, or all of them together."""


class Processors:
    """The energy that the processors and their memory have used since this was made, as RAPL tells.

    Its counters have 32 bits and begin anew after minutes of hard work: `joules` must be asked more often.

    Args:
        root: the kernel's folder of zones.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._last: dict[Path, int] = {}
        self._used = 0
        for zone in sorted(root.glob("intel-rapl:*")):
            value = _number(zone / "energy_uj")
            if value is not None and _text(zone / "name").startswith(_COUNTED):
                self._last[zone] = value

    def joules(self) -> float | None:
        """Return the energy so far in joules; None where no counter can be read."""
        for zone, before in list(self._last.items()):
            now, largest = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
            if now is None or (now < before and not largest):
                del self._last[zone]
                self._used, self._last = 0, {}  # A part of them would look like all.
                break
            self._used += now - before if now >= before else now + (largest or 0) - before
            self._last[zone] = now
        return self._used / 1e6 if self._last else None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and text.isascii() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def visible_gpus(devices: Path = DEVICES, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; None where unknown.

    Without importing PyTorch, which takes seconds: the device files tell. A container has those of its GPUs.
    """
    files = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if not files:
        # Of AMD's GPUs and of those of a Windows host there is one file, however many there are.
        return None if any((devices / name).exists() for name in ("kfd", "dxg")) else []
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(number) for number in range(len(files))]
    names = []
    for name in map(str.strip, chosen.split(",")):
        known = name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < len(files))
        if not known:  # CUDA takes those before the first that means nothing.
            break
        names.append(name)
    return names


class Gpus:
    """The energy that some GPUs have used since this was made, as NVML tells (from Volta on).

    Args:
        names: see `visible_gpus`. Numbers are taken in NVML's order; CUDA's differs where a machine has
            GPUs of several models, unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
        library: NVML; None loads that of the driver.
    """

    def __init__(self, names: list[str], library: Any = None) -> None:
        self._library, self._handles = library, list[ctypes.c_void_p]()
        self._before: int | None = 0 if not names else None
        if not names:
            return
        try:
            self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
            if self._library.nvmlInit_v2() == 0:
                self._handles = [self._handle(name) for name in names]
                self._before = self._millijoules()
        except (OSError, AttributeError, LookupError) as error:
            _LOG.debug("NVML tells nothing: %s", error)

    def joules(self) -> float | None:
        """Return the energy so far in joules; None where a GPU, or the driver, does not tell."""
        if self._before is None:
            return None
        now = self._millijoules()
        # The counter begins anew with the driver.
        return None if now is None or now < self._before else (now - self._before) / 1e3

    def _handle(self, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            code = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            code = self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if code:
            raise LookupError(f"NVML knows no GPU {name}: error {code}")
        return handle

    def _millijoules(self) -> int | None:
        total = 0
        for handle in self._handles:
            value = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)):
                return None
            total += value.value
        return total
