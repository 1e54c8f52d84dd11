"""Checks the machine of a training process (limits, /dev/shm, networks, GPUs, RDMA), or of a local run."""

import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from trainer import storage
from trainer.base.errors import ConfigError, StorageError, first_line, install_extra
from trainer.base.worker_pool import available_cores

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CAP_IPC_LOCK = 14  # linux/capability.h
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
_MIN_LIMITS = {"nofile": 65536, "nproc": 4096}  # recommended limits of open files and of processes
_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}
_MIN_FREE_GIB = 3  # Memory of the recipe `debug` on the sample with two processes.
_PACKAGES = ("torch", "torchvision", "pycocotools", "simplejpeg", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Needs:
    """Requirements of a run; everything else is only reported."""

    gpus: int = 0  # CUDA devices
    rdma: bool = False  # whether an RDMA device and unlimited locked memory are needed
    interface: str = ""  # network interface of the processes; empty is any
    shared_memory: int = 0  # bytes of /dev/shm
    output: str = ""  # URI of a folder that must be writable, if any


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    title: str
    state: Literal["ok", "warning", "missing"]  # missing: not available although required
    detail: str
    fix: str = ""  # remedy; empty if the state is ok

    @classmethod
    def ok_if(cls, good: bool, title: str, detail: str, fix: str, *, needed: bool = False) -> "Check":
        """Return a result that is ok if it is good, else missing if it is needed, else a warning."""
        return cls(title, "ok" if good else "missing" if needed else "warning", detail, "" if good else fix)


def examine(needs: Needs, root: Path = Path("/")) -> Iterator[Check]:
    """Run the checks of a training process; `root` has /proc, /sys and /dev."""
    yield _shared_memory(needs, root)
    yield _interfaces(needs)
    yield _gpus(needs, root)
    yield from _limits(needs, root)
    yield from _rdma(needs, root)
    if needs.output:
        yield writable(needs.output)


def check_machine(needs: Needs, root: Path = Path("/")) -> Iterator[Check]:
    """Run the checks of a local run, without warnings about devices and limits of clusters."""
    if not (is_linux := platform.system() == "Linux"):
        detail = f"{platform.system()}: training runs on Linux; other commands run here"
        yield Check("system", "missing", detail, "use Linux, a container or WSL")
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        detail = f"not installed: {', '.join(missing)}"
        yield Check("packages", "missing", detail, install_extra("train"))
    else:
        shown = ", ".join(f"{name} {version(name)}" for name in ("kubedet", "torch", "torchvision", "kfp"))
        yield Check("packages", "ok", f"{shown}, Python {platform.python_version()}")
    match = re.search(r"MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"))
    free = int(match[1]) * 1024 if match else 0
    detail = f"{available_cores()} cores, {free / 2**30:.1f} GiB of memory free"
    fix = f"close other programs, or use --nproc 1: the recipe debug takes {_MIN_FREE_GIB} GiB"
    if is_linux:
        yield Check.ok_if(free >= _MIN_FREE_GIB * 2**30, "machine", detail, fix)
    is_local = needs.output and storage.is_local(needs.output)
    folder = Path(storage.absolute(needs.output)) if is_local else Path.cwd()
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    fix = "free space there, or choose another --data-root and --output"
    yield Check.ok_if(free >= 2**30, "disk", f"{free / 2**30:.1f} GiB free at {folder}", fix)
    for check in examine(needs, root) if is_linux and find_spec("torch") else ():
        if check.title == "GPUs" and check.state == "warning":
            yield replace(check, state="ok", detail=f"{check.detail}: training is on the CPU", fix="")
        elif check.state != "warning" or needs.gpus > 1:
            yield check


def report(checks: Iterable[Check], *, as_json: bool) -> list[Check]:
    """Print each result when it is known, or all as a JSON list; returns them."""
    results, console = [], Console(highlight=False)
    for check in checks:
        results.append(check)
        if not as_json:
            fix = f"\n         fix: {check.fix}" if check.fix else ""
            state = (f"{check.state:8}", _STYLES[check.state])
            console.print(Text.assemble(state, f" {check.title}: {check.detail}{fix}"), soft_wrap=True)
    if as_json:
        print(json.dumps([asdict(check) for check in results], indent=2))
    return results


def size(text: str) -> int:
    """Parse an amount of memory like 8Gi or 64M; returns bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)?", text)
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of memory", fix="write it like 8Gi or 512Mi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def writable(uri: str) -> Check:
    """Write a small file into a folder, read it and delete it."""
    try:
        storage.check_writable(uri)
    except StorageError as error:
        return Check("output", "missing", error.message, error.fix)
    return Check("output", "ok", f"{uri} was written, read and deleted from")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _shared_memory(needs: Needs, root: Path) -> Check:
    title, required = "shared memory", needs.shared_memory
    try:
        file_system = os.statvfs(root / "dev" / "shm")
    except OSError as error:
        return Check(title, "missing", f"no /dev/shm: {error.strerror}", "mount a memory volume there")
    total, free = file_system.f_frsize * file_system.f_blocks, file_system.f_frsize * file_system.f_bavail
    wanted = f"; {required / 2**30:.2f} GiB required" if required else ""
    detail = f"{total / 2**30:.2f} GiB in /dev/shm, {free / 2**30:.2f} free{wanted}"
    fix = "set shared_memory of the job (the default of a container is 64 MiB, too little for NCCL)"
    return Check.ok_if(total >= max(required, 2**30), title, detail, fix, needed=total < required)


def _interfaces(needs: Needs) -> Check:
    import fcntl

    by_name: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for name, found in by_name.items():
            with suppress(OSError):  # It has no IPv4 address.
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        number, *_, name = line.split()
        address = ipaddress.IPv6Address(int(number, 16))
        if name in by_name and not address.is_link_local:
            by_name[name].append(str(address))
    detail = "; ".join(f"{name} {' '.join(each) or 'without address'}" for name, each in by_name.items())
    good = any(each for name, each in by_name.items() if name != "lo")
    if needs.interface:
        good, detail = bool(by_name.get(needs.interface)), f"{needs.interface} required; there are {detail}"
    fix = (
        "use one of these that has an address (network.interface of the job), or attach the secondary "
        "network "
        "with the annotation k8s.v1.cni.cncf.io/networks"
    )
    return Check.ok_if(good, "network interfaces", detail or "none", fix, needed=bool(needs.interface))


def _gpus(needs: Needs, root: Path) -> Check:
    import torch

    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", _text(root / "proc/driver/nvidia/version"))
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
    required = f" of {needs.gpus} required" if needs.gpus else ""
    detail = f"{count}{required} {', '.join(kinds)} ({versions})".replace("  ", " ")
    fix = (
        "set gpus of the job; if its pod has them, its PyTorch is without CUDA (use another image) or newer "
        "than the node's driver, or a device is faulty (nvidia-smi)"
    )
    good, needed = 0 < count >= needs.gpus and not broken, needs.gpus > 0 or bool(broken)
    return Check.ok_if(good, "GPUs", "; ".join([detail, *broken]), fix, needed=needed)


def _limits(needs: Needs, root: Path) -> Iterator[Check]:
    import resource

    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    limits = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    low = [f"{name} {least}" for name, least in _MIN_LIMITS.items() if 0 <= limits[name] < least]
    detail = ", ".join(f"{name} {'unlimited' if n < 0 else n}" for name, n in limits.items())
    fix = f"raise them on the nodes (ulimits of the container runtime) to at least {', '.join(low)}"
    yield Check.ok_if(not low, "limits", detail, fix)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"))
    exempt = bool(capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    endless = limit == resource.RLIM_INFINITY
    scope = ", not applied: the process has IPC_LOCK" if exempt else ""
    detail = "unlimited" if endless else f"{limit // 1024} KiB{scope}"
    fix = (
        "RDMA registers memory (ibv_reg_mr): set the container runtime's limit memlock to unlimited on the "
        "nodes; IPC_LOCK has no effect for users other than root"
    )
    yield Check.ok_if(endless or exempt, "locked memory", detail, fix, needed=needs.rdma)


def _rdma(needs: Needs, root: Path) -> Iterator[Check]:
    """Check RDMA devices and, if there are NVIDIA's driver and a port, GPUDirect by peermem or DMA-BUF."""
    ports, active = [], False
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, link, rate = (_text(port / name).strip() for name in ("state", "link_layer", "rate"))
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
    yield Check.ok_if(active and bool(usable), "RDMA devices", detail, fix, needed=needs.rdma)
    driver = _text(root / "proc/driver/nvidia/version")
    if driver and ports:
        peermem, is_open = (root / "sys/module/nvidia_peermem").exists(), "Open Kernel Module" in driver
        loaded, modules = "loaded" if peermem else "not loaded", "open" if is_open else "closed"
        detail = f"nvidia_peermem is {loaded}; the driver's modules are {modules}"
        fix = (
            "data goes through host memory: load nvidia_peermem on the nodes (`modprobe nvidia-peermem`, or "
            "driver.rdma.enabled of the GPU operator)"
        )
        yield Check.ok_if(peermem or is_open, "GPUDirect RDMA", detail, fix)
