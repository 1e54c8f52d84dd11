"""Checks of this machine for `kubedet run`."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from trainer import storage
from trainer.launching.doctor import Check, Needs, examine

_PACKAGES = {
    "": ("torch", "torchvision", "pycocotools", "simplejpeg"),
    "pipeline": ("kfp",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
"""What is imported, by the extra of kubedet that installs it."""

# What the recipe `debug` takes on the sample with two processes, and some more.
_MEMORY = 3 * 2**30
_DISK = 2**30


def check(needs: Needs, root: Path = Path("/")) -> Iterator[Check]:
    """Check this machine. What is not there is told only if it is asked for: one machine needs little.

    Args:
        needs: what must be there.
        root: where /proc, /sys and /dev are found.

    Yields:
        One check for each thing; of what needs PyTorch none where that is missing.
    """
    packages = _packages()
    yield packages
    yield _machine(root)
    yield _disk(needs.output)
    if packages.state == "ok" or find_spec("torch"):
        for result in examine(needs, root):
            if result.title == "GPUs" and result.state == "warning":
                yield replace(result, state="ok", detail=f"{result.detail}: training is on the CPU", fix="")
            elif result.state != "warning" or needs.gpus > 1:
                yield result


def _packages() -> Check:
    missing = {extra: [name for name in names if not find_spec(name)] for extra, names in _PACKAGES.items()}
    extras = [extra for extra, names in missing.items() if names and extra]
    names = [name for group in missing.values() for name in group]
    if not names:
        installed = ", ".join(
            f"{name} {version(name)}" for name in ("kubedet", "torch", "torchvision", "kfp")
        )
        return Check(
            "packages", "ok", f"all that a run imports; {installed}, Python {platform.python_version()}"
        )
    requirement = f"kubedet[{','.join(extras)}]" if extras else "kubedet"
    return Check("packages", "missing", f"not installed: {', '.join(names)}", f"pip install '{requirement}'")


def _machine(root: Path) -> Check:
    """Check the cores of this process, and the available memory."""
    free = re.search(r"MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text())
    amount = int(free[1]) * 1024 if free else 0
    detail = f"{len(os.sched_getaffinity(0))} cores, {amount / 2**30:.1f} GiB of memory free"
    if amount >= _MEMORY:
        return Check("machine", "ok", detail)
    fix = f"end other programs, or use --nproc 1: a run of the recipe debug takes {_MEMORY / 2**30:.0f} GiB"
    return Check("machine", "warning", detail, fix)


def _disk(uri: str) -> Check:
    """Check the free space for data and runs; those in a bucket need none here."""
    place = Path(storage.absolute(uri)) if uri and storage.is_local(uri) else Path.cwd()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free at {place}"
    if free >= _DISK:
        return Check("disk", "ok", detail)
    return Check("disk", "warning", detail, "free space there, or choose another --data-root and --output")
