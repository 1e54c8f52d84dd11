"""Checks whether this machine is fit for training: limits, /dev/shm, GPUs, RDMA, packages, memory, disk."""

import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from trainer import storage
from trainer.base.errors import StorageError, first_line, install_command
from trainer.base.worker_pool import available_cores

_CAP_IPC_LOCK = 14  # linux/capability.h
_MIN_LIMITS = {"nofile": 65536, "nproc": 4096}  # recommended limits of open files and of processes
_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}
_NVIDIA_VERSION = "proc/driver/nvidia/version"
_MIN_FREE_GIB = 3  # Memory that the recipe `debug` needs with two processes.
_PACKAGES = ("torch", "torchvision", "pycocotools", "simplejpeg", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    title: str
    state: Literal["ok", "warning", "missing"]  # missing: not available although required
    detail: str
    fix: str = ""  # remedy; empty if the state is ok

    @classmethod
    def from_bool(cls, good: bool, title: str, detail: str, fix: str, *, needed: bool = False) -> "Check":
        """Return a result that is ok if `good`, else missing if `needed`, else a warning."""
        return cls(title, "ok" if good else "missing" if needed else "warning", detail, "" if good else fix)


def check_training_machine(gpus: int = 0, *, rdma: bool = False, root: Path = Path("/")) -> Iterator[Check]:
    """Check the machine of a training process; `root` contains /proc, /sys and /dev.

    `gpus` GPUs are required and, with `rdma`, an RDMA device and unlimited locked memory.
    """
    yield _check_shared_memory(root)
    yield _check_gpus(gpus, root)
    yield from _check_limits(rdma, root)
    yield _check_rdma(rdma, root)


def check_local_machine(gpus: int = 0, data_root: str = "", root: Path = Path("/")) -> Iterator[Check]:
    """Check the machine of a local run, without warnings that only matter in clusters."""
    if not (is_linux := platform.system() == "Linux"):
        detail = f"{platform.system()}: training requires Linux; other commands work"
        yield Check("system", "missing", detail, "use Linux, a container or WSL")
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        detail = f"not installed: {', '.join(missing)}"
        yield Check("packages", "missing", detail, install_command("train"))
    else:
        shown = ", ".join(f"{name} {version(name)}" for name in ("kubedet", "torch", "torchvision", "kfp"))
        yield Check("packages", "ok", f"{shown}, Python {platform.python_version()}")
    match = re.search(r"MemAvailable:\s*(\d+) kB", _read_text(root / "proc/meminfo"))
    free = int(match[1]) * 1024 if match else 0
    detail = f"{available_cores()} cores, {free / 2**30:.1f} GiB of memory free"
    fix = f"close other programs, or use --nproc 1: the recipe debug takes {_MIN_FREE_GIB} GiB"
    if is_linux:
        yield Check.from_bool(free >= _MIN_FREE_GIB * 2**30, "machine", detail, fix)
    is_local = data_root and storage.is_local(data_root)
    folder = Path(storage.absolute(data_root)) if is_local else Path.cwd()
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    fix = "free space there, or choose another --data-root and --output"
    yield Check.from_bool(free >= 2**30, "disk", f"{free / 2**30:.1f} GiB free at {folder}", fix)
    for check in check_training_machine(gpus, root=root) if is_linux and find_spec("torch") else ():
        if check.title == "GPUs" and check.state == "warning":
            yield replace(check, state="ok", detail=f"{check.detail}: training will use the CPU", fix="")
        elif check.state != "warning" or gpus > 1:
            yield check
    if data_root:
        yield check_output(data_root)


def print_results(checks: Iterable[Check]) -> list[Check]:
    """Print each result as it arrives, and return all results."""
    results, console = [], Console(highlight=False)
    for check in checks:
        results.append(check)
        fix = f"\n         fix: {check.fix}" if check.fix else ""
        state = (f"{check.state:8}", _STYLES[check.state])
        console.print(Text.assemble(state, f" {check.title}: {check.detail}{fix}"), soft_wrap=True)
    return results


def check_output(uri: str) -> Check:
    """Check that a folder is writable, by writing, reading and deleting a small file."""
    try:
        storage.check_writable(uri)
    except StorageError as error:
        return Check("output", "missing", error.message, error.fix)
    return Check("output", "ok", f"{uri} is writable")


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _check_shared_memory(root: Path) -> Check:
    title = "shared memory"
    try:
        file_system = os.statvfs(root / "dev" / "shm")
    except OSError as error:
        return Check(title, "missing", f"no /dev/shm: {error.strerror}", "mount a memory volume there")
    total, free = file_system.f_frsize * file_system.f_blocks, file_system.f_frsize * file_system.f_bavail
    detail = f"{total / 2**30:.2f} GiB in /dev/shm, {free / 2**30:.2f} free"
    fix = "set shared_memory of the job (the default of a container is 64 MiB, too little for NCCL)"
    return Check.from_bool(total >= 2**30, title, detail, fix)


def _check_gpus(required: int, root: Path) -> Check:
    import torch

    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", _read_text(root / _NVIDIA_VERSION))
    versions = f"PyTorch {torch.__version__}, driver {driver[1] if driver else 'none'}"
    if torch.version.cuda:
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    count = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    broken = []
    for index in range(count):
        try:
            torch.ones(1, device=f"cuda:{index}").item()
        except RuntimeError as error:
            broken.append(f"device {index}: {first_line(error)}")
    wanted = f" of {required} required" if required else ""
    detail = f"{count}{wanted} {', '.join(kinds)} ({versions})".replace("  ", " ")
    fix = (
        "set gpus of the job; if the pod has GPUs, its PyTorch lacks CUDA (use another image) or is newer "
        "than the node's driver, or a device is faulty (nvidia-smi)"
    )
    good, needed = 0 < count >= required and not broken, required > 0 or bool(broken)
    return Check.from_bool(good, "GPUs", "; ".join([detail, *broken]), fix, needed=needed)


def _check_limits(rdma: bool, root: Path) -> Iterator[Check]:
    import resource

    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    limits = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    low = [f"{name} {least}" for name, least in _MIN_LIMITS.items() if 0 <= limits[name] < least]
    detail = ", ".join(f"{name} {'unlimited' if n < 0 else n}" for name, n in limits.items())
    fix = f"raise the container runtime's ulimits on the nodes to at least {', '.join(low)}"
    yield Check.from_bool(not low, "limits", detail, fix)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", _read_text(root / "proc/self/status"))
    exempt = bool(capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    endless = limit == resource.RLIM_INFINITY
    scope = ", not applied: the process has IPC_LOCK" if exempt else ""
    detail = "unlimited" if endless else f"{limit // 1024} KiB{scope}"
    fix = (
        "RDMA registers memory (ibv_reg_mr): set the container runtime's limit memlock to unlimited on the "
        "nodes; IPC_LOCK has no effect for users other than root"
    )
    yield Check.from_bool(endless or exempt, "locked memory", detail, fix, needed=rdma)


def _check_rdma(required: bool, root: Path) -> Check:
    ports, active = [], False
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, link, rate = (_read_text(port / name).strip() for name in ("state", "link_layer", "rate"))
        ports.append(f"{port.parent.parent.name}:{port.name} {state.split(': ')[-1]} {link} {rate}")
        active |= "ACTIVE" in state
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    usable = [path for path in verbs if os.access(path, os.R_OK | os.W_OK)]
    devices = [f"{len(usable)} of {len(verbs)} /dev/infiniband/uverbs* are usable"] if ports else []
    fix = (
        "request the cluster's RDMA resource (resources of the job, e.g. rdma/hca=1) and its network; a port "
        "must be ACTIVE"
    )
    detail = "; ".join(ports + devices) or "none"
    return Check.from_bool(active and bool(usable), "RDMA devices", detail, fix, needed=required)
