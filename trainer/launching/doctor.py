"""Checks the machine of a training process (limits, /dev/shm, networks, GPUs, RDMA), or of a local run.

It reads what the kernel and PyTorch report and changes nothing; only `output` is written to.
"""

import fcntl
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trainer import storage
from trainer.base.errors import ConfigError, StorageError, first_line
from trainer.storage.probe import check_writable

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CAP_IPC_LOCK = 14  # linux/capability.h
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


_LEAST_LIMITS = {"nofile": 65536, "nproc": 4096}
"""Open files and processes of a user, below which a training with many loader processes may fail."""


@dataclass(frozen=True)
class Needs:
    """Requirements of a run; everything else is only reported."""

    gpus: int = 0
    """CUDA devices."""
    rdma: bool = False
    """Whether an RDMA device and unlimited locked memory are needed."""
    interface: str = ""
    """Network interface that the processes talk over; empty is any."""
    shared_memory: int = 0
    """Bytes of /dev/shm."""
    output: str = ""
    """URI of a folder to be written; empty checks none."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    title: str
    """Name of the check."""
    state: Literal["ok", "warning", "missing"]
    """warning: not available, but not required; missing: required, but not available."""
    detail: str
    """The result."""
    fix: str = ""
    """What to do; empty if the state is ok."""

    def __str__(self) -> str:
        line = f"{self.state:8} {self.title}: {self.detail}"
        return f"{line}\n         fix: {self.fix}" if self.fix else line


def examine(needs: Needs, root: Path = Path("/")) -> Iterator[Check]:
    """Run all checks, in the order in which problems would stop a run; `root` has /proc, /sys and /dev."""
    yield _shared_memory(needs, root)
    yield _interfaces(needs)
    yield _gpus(needs, root)
    yield _limits()
    yield _locked_memory(needs, root)
    yield _rdma(needs, root)
    yield from _gpu_direct(root)
    if needs.output:
        yield writable(needs.output)


def size(text: str) -> int:
    """Parse an amount of memory like 8Gi or 64M; returns bytes.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)?", text)
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of memory", fix="write it like 8Gi or 512Mi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _check(title: str, detail: str, *, good: bool, needed: bool, fix: str) -> Check:
    if good:
        return Check(title, "ok", detail)
    return Check(title, "missing" if needed else "warning", detail, fix)


def _shared_memory(needs: Needs, root: Path) -> Check:
    title = "shared memory"
    try:
        file_system = os.statvfs(root / "dev" / "shm")
    except OSError as error:
        return Check(title, "missing", f"no /dev/shm: {error.strerror}", "mount a memory volume there")
    total, free = file_system.f_frsize * file_system.f_blocks, file_system.f_frsize * file_system.f_bavail
    required = needs.shared_memory
    detail = f"{_gib(total)} in /dev/shm, {_gib(free)} free"
    if required:
        detail += f"; {_gib(required)} asked for"
    return _check(
        title, detail, good=total >= max(required, 2**30), needed=total < required,
        fix="set shared_memory of the job (a container has 64 MiB otherwise; NCCL dies of a bus error)",
    )  # fmt: skip


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _interfaces(needs: Needs) -> Check:
    addresses_by_interface = addresses()
    detail = "; ".join(
        f"{name} {' '.join(each) or 'without address'}" for name, each in addresses_by_interface.items()
    )
    usable = [name for name, each in addresses_by_interface.items() if each and name != "lo"]
    if needs.interface:
        detail = f"{needs.interface} asked for; there are {detail}"
    return _check(
        "network interfaces", detail or "none", needed=bool(needs.interface),
        good=bool(addresses_by_interface.get(needs.interface)) if needs.interface else bool(usable),
        fix="name one of these with an address (network.interface of the job), or attach the secondary "
        "network with the annotation k8s.v1.cni.cncf.io/networks",
    )  # fmt: skip


def addresses() -> dict[str, list[str]]:
    """Return the network interfaces of this machine and their IP addresses, IPv4 first.

    Link-local ones are left out: other machines cannot be given them.
    """
    by_interface: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for name, ip_addresses in by_interface.items():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            ip_addresses.append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        number, *_, name = line.split()
        if name in by_interface:
            address = ipaddress.IPv6Address(int(number, 16))
            by_interface[name] += [] if address.is_link_local else [str(address)]
    return by_interface


def _gpus(needs: Needs, root: Path) -> Check:
    import torch

    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", _text(root / "proc/driver/nvidia/version"))
    versions = f"PyTorch {torch.__version__}, driver {driver[1] if driver else 'none'}"
    if torch.version.cuda is None:
        fix = "use an image whose PyTorch has CUDA"
        return _check("GPUs", f"none: {versions} without CUDA", good=False, needed=needs.gpus > 0, fix=fix)
    versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    count = torch.cuda.device_count()
    kinds = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    broken = [reason for index in range(count) if (reason := _refusal(index))]
    required = f" of {needs.gpus} asked for" if needs.gpus else ""
    detail = f"{count}{required}{' ' if kinds else ''}{', '.join(kinds)} ({versions})"
    return _check(
        "GPUs", "; ".join([detail, *broken]), good=0 < count >= needs.gpus and not broken,
        needed=needs.gpus > 0 or bool(broken),
        fix="set gpus of the job; where its pod has them, the node's driver is too old for this CUDA "
        f"({torch.version.cuda}) or a device is faulty (nvidia-smi)",
    )  # fmt: skip


def _refusal(index: int) -> str:
    """Return why a GPU cannot be used, or ""."""
    import torch

    try:
        torch.ones(1, device=f"cuda:{index}").item()
    except RuntimeError as error:
        return f"device {index}: {first_line(error)}"
    return ""


def _locked_memory(needs: Needs, root: Path) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"))
    exempt = bool(capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    endless = limit == resource.RLIM_INFINITY
    detail = "unlimited" if endless else f"{limit // 1024} KiB"
    if exempt and not endless:
        detail += ", not applied: the process has IPC_LOCK"
    return _check(
        "locked memory", detail, good=endless or exempt, needed=needs.rdma,
        fix="RDMA registers memory (ibv_reg_mr): set the container runtime's limit memlock to unlimited "
        "on the nodes; a user other than root does not get IPC_LOCK by asking for it",
    )  # fmt: skip


def _limits() -> Check:
    """Check the limits of open files and processes: loader processes open shards, sockets and pipes."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    soft = {name: resource.getrlimit(number)[0] for name, number in limits.items()}
    texts = [f"{name} {'unlimited' if limit < 0 else limit}" for name, limit in soft.items()]
    low = [name for name, limit in soft.items() if 0 <= limit < _LEAST_LIMITS[name]]
    least = ", ".join(f"{name} {_LEAST_LIMITS[name]}" for name in low)
    return _check(
        "limits", ", ".join(texts), good=not low, needed=False,
        fix=f"raise them on the nodes (ulimits of the container runtime) to at least {least}",
    )  # fmt: skip


def _gpu_direct(root: Path) -> Iterator[Check]:
    """Check whether an RDMA device can read a GPU's memory: by nvidia_peermem, or by DMA-BUF."""
    title, driver = "GPUDirect RDMA", _text(root / "proc/driver/nvidia/version")
    if not driver or not any((root / "sys/class/infiniband").glob("*")):
        return
    if (root / "sys/module/nvidia_peermem").exists():
        yield Check(title, "ok", "the module nvidia_peermem is loaded")
    elif "Open Kernel Module" in driver:
        yield Check(title, "ok", "by DMA-BUF: the driver has the open kernel modules")
    else:
        yield Check(
            title, "warning", "nvidia_peermem is not loaded: data goes through the memory of the host",
            "load it on the nodes: `modprobe nvidia-peermem`, or driver.rdma.enabled of the GPU operator",
        )  # fmt: skip


def _rdma(needs: Needs, root: Path) -> Check:
    ports, active = [], False
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, link, rate = (_text(port / name).strip() for name in ("state", "link_layer", "rate"))
        name = f"{port.parent.parent.name}:{port.name}"
        ports.append(f"{name} {state.partition(': ')[2] or state} {link} {rate}")
        active |= "ACTIVE" in state
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    opened = [path for path in verbs if os.access(path, os.R_OK | os.W_OK)]
    if ports:
        ports.append(f"{len(opened)} of {len(verbs)} /dev/infiniband/uverbs* may be used")
    return _check(
        "RDMA devices", "; ".join(ports) or "none", good=active and bool(opened), needed=needs.rdma,
        fix="ask for the cluster's RDMA resource (resources of the job, e.g. rdma/hca=1) and its network; "
        "a port must be ACTIVE",
    )  # fmt: skip


def writable(uri: str) -> Check:
    """Write a small file into a folder, read it and delete it."""
    try:
        check_writable(uri)
    except StorageError as error:
        return Check("output", "missing", error.message, error.fix)
    return Check("output", "ok", f"{uri} was written, read and deleted from")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_PACKAGES = {
    "": ("torch", "torchvision", "pycocotools", "simplejpeg"),
    "pipeline": ("kfp",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
"""What is imported, by the extra of kubedet that installs it."""

# What the recipe `debug` takes on the sample with two processes, and some more.
_FREE_MEMORY = 3 * 2**30
_FREE_DISK = 2**30


def check_machine(needs: Needs, root: Path = Path("/")) -> Iterator[Check]:
    """Check this machine: a device or limit that is not needed is no finding, for one machine needs little.

    Without PyTorch its checks are left out.
    """
    packages = _packages()
    yield packages
    yield _memory(root)
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


def _memory(root: Path) -> Check:
    """Check the cores of this process, and the available memory."""
    free = re.search(r"MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text())
    amount = int(free[1]) * 1024 if free else 0
    detail = f"{len(os.sched_getaffinity(0))} cores, {amount / 2**30:.1f} GiB of memory free"
    if amount >= _FREE_MEMORY:
        return Check("machine", "ok", detail)
    needed = f"{_FREE_MEMORY / 2**30:.0f} GiB"
    fix = f"end other programs, or use --nproc 1: a run of the recipe debug takes {needed}"
    return Check("machine", "warning", detail, fix)


def _disk(uri: str) -> Check:
    """Check the free space for data and runs; those in a bucket need none here."""
    place = Path(storage.absolute(uri)) if uri and storage.is_local(uri) else Path.cwd()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free at {place}"
    if free >= _FREE_DISK:
        return Check("disk", "ok", detail)
    return Check("disk", "warning", detail, "free space there, or choose another --data-root and --output")
