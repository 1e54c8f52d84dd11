"""Checks the machine of a training process: locked memory, /dev/shm, networks, GPUs, RDMA, storage.

It reads what the kernel and PyTorch report and changes nothing; only `output` is written to.
"""

import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.base.errors import ConfigError, StorageError, first_line
from trainer.storage.probe import check_writable

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CAP_IPC_LOCK = 14  # linux/capability.h
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


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
    """Run all checks, in the order in which the problems would stop a run.

    Args:
        needs: what must be there.
        root: where /proc, /sys and /dev are found.
    """
    yield _shared_memory(needs, root)
    yield _interfaces(needs)
    yield _gpus(needs, root)
    yield _locked_memory(needs, root)
    yield _rdma(needs, root)
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
    """Write a small file into a folder, read it and delete it.

    Args:
        uri: the folder.
    """
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
