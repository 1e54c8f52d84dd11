"""`kubedet doctor`: checks for what a run needs."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.commands import Commands
from pipelines.commands import options as shared
from trainer.base.errors import EXIT_FAILURE, ConfigError, KubedetError
from trainer.base.safe_text import whole_number

if TYPE_CHECKING:
    from trainer.launching.doctor import Check

_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red"}
_GPU = "nvidia.com/gpu"
_IN_CLUSTER = (
    "namespace", "credentials", "claim", "resource", "queue", "job", "size", "step_cpu", "step_memory",
    "host", "ca",
)  # fmt: skip
_IN_PODS = ("shared_memory", "interface", "rdma")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        description="Check what a run in the cluster of KUBECONFIG needs, or with --local what `kubedet run` "
        "needs of this machine. Exit code: 0 if a run can be started, 1 if something is missing.",
    )
    parser.add_argument("--local", action="store_true", help="check this machine alone")
    parser.add_argument(
        "--data-root", default="", metavar="URI", help="write, read and delete a small file there, from here"
    )
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each machine")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: text")
    cluster = parser.add_argument_group("in a cluster")
    cluster.add_argument("-n", "--namespace", default="", metavar="NAME", help="default: KUBECONFIG's")
    cluster.add_argument(
        "--credentials", default="", metavar="SECRET", help="Secret with the object store's keys"
    )
    cluster.add_argument("--claim", default="", metavar="PVC", help="PersistentVolumeClaim of the data root")
    cluster.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of a job (default: 1)")
    cluster.add_argument(
        "--resource", action="append", default=[], metavar="NAME[=N]",
        help="devices of each machine, e.g. rdma/hca=1; without a number they are counted",
    )  # fmt: skip
    cluster.add_argument(
        "--queue", default="", metavar="NAME",
        help="LocalQueue of Kueue: does it take jobs, does Kueue serve their kind, does any wait in vain",
    )  # fmt: skip
    shared.add_sizes(cluster, "default: not checked")
    cluster.add_argument(
        "--host", default="", metavar="URL", help="Kubeflow Pipelines' API (default: $KFP_ENDPOINT)"
    )
    cluster.add_argument("--ca", default="", metavar="FILE", help="certificate of that host's own authority")
    pods = parser.add_argument_group("in the pods of a job")
    pods.add_argument(
        "--job", default="", metavar="NAME",
        help="check the pods of a running job: /dev/shm, network interfaces, GPUs, memlock, RDMA",
    )  # fmt: skip
    pods.add_argument("--shared-memory", default="", metavar="SIZE", help="least /dev/shm, e.g. 8Gi")
    pods.add_argument("--interface", default="", metavar="NAME", help="network interface of NCCL, e.g. net1")
    pods.add_argument("--rdma", action="store_true", help="an RDMA device and unlimited locked memory")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    _check_options(options)
    results = _local(options) if options.local else chain(_cluster(options), _pipelines(options))
    if options.output == "json":
        checks = list(results)
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        checks = _print_checks(results)
    return EXIT_FAILURE if any(check.state == "missing" for check in checks) else 0


def _local(options: argparse.Namespace) -> "Iterator[Check]":
    from trainer.launching import doctor as machine

    yield from machine.check_machine(machine.Needs(gpus=options.gpus, output=options.data_root))


def _cluster(options: argparse.Namespace) -> "Iterator[Check]":
    from components import doctor
    from components.launchers.cluster.backend import ClusterBackend
    from pipelines import sizes
    from trainer.launching import doctor as machine

    try:
        backend = ClusterBackend.connect(options.namespace)
    except ConfigError as error:
        yield machine.Check("cluster", "missing", error.message, error.fix)
        return
    cpu, memory = options.step_cpu, options.step_memory
    if options.size:
        cpu, memory = sizes.request(options.size, cpu, memory).values()
    resources = {_GPU: options.gpus} if options.gpus else {}
    for name, _, number in (text.partition("=") for text in options.resource):
        resources[name] = int(number or 0)
    yield from doctor.check_cluster(
        backend, nodes=options.nodes, resources=resources, secret=options.credentials, claim=options.claim,
        step={name: text for name, text in (("cpu", cpu), ("memory", memory)) if text},
    )  # fmt: skip
    if options.queue:
        yield from doctor.check_queue(backend, options.queue)
    if options.data_root:
        yield machine.writable(options.data_root)
    if options.job:
        shared_memory = machine.size(options.shared_memory or "0")
        needs = machine.Needs(options.gpus, options.rdma, options.interface, shared_memory)
        yield from doctor.check_pods(backend, options.job, needs)


def _pipelines(options: argparse.Namespace) -> "Iterator[Check]":
    """Check the version of Kubeflow Pipelines, if a host is named."""
    from pipelines.access import HOSTS, Access
    from trainer.launching.doctor import Check

    title = "Kubeflow Pipelines"
    access = Access.find(options.host, options.namespace, options.ca)
    if not access.host:
        yield Check(title, "ok", f"not checked: neither --host nor {HOSTS[0]} names it")
        return
    from pipelines.kubeflow import Server, check_version  # kfp, which takes a while.

    try:
        tag = Server(access).version()
        warning = check_version(tag)
    except KubedetError as error:
        yield Check(title, "missing", error.message, error.fix)
        return
    fix = "a run of the recipe debug shows whether it works there" if warning else ""
    yield Check(title, "warning" if warning else "ok", warning or f"{tag} at {access.host}", fix)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that have no effect, and values that cannot be used."""
    from pipelines import sizes
    from trainer.launching.doctor import size

    not_used: dict[str, tuple[str, ...]] = (
        {"means nothing with --local": _IN_CLUSTER + _IN_PODS} if options.local else {}
    )
    not_used |= {} if options.local or options.job else {"needs --job": _IN_PODS}
    problems = [
        f"--{name.replace('_', '-')} {reason}"
        for reason, names in not_used.items()
        for name in names
        if getattr(options, name)
    ]
    problems += [f"--nodes {options.nodes} is less than one"] if options.nodes < 1 else []
    problems += [f"--gpus {options.gpus} is less than zero"] if options.gpus < 0 else []
    for text in options.resource:
        name, equals, number = text.partition("=")
        if not name or (equals and whole_number(number) is None):
            problems.append(f"--resource {text!r} is not NAME or NAME=N")
    cpu, memory = sizes.SIZES[sizes.DEFAULT]
    try:
        sizes.check(options.step_cpu or cpu, options.step_memory or memory)
        size(options.shared_memory or "0")
    except ConfigError as error:
        problems += error.message.splitlines()
    if problems:
        raise ConfigError("; ".join(problems), fix="see `kubedet doctor --help`")


def _print_checks(results: "Iterator[Check]") -> "list[Check]":
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    checks = []
    for check in results:
        checks.append(check)
        text = Text(str(check))
        text.stylize(_STYLES[check.state], 0, len(check.state))
        console.print(text, soft_wrap=True)
    count = sum(check.state == "missing" for check in checks)
    console.print(f"\n{count} missing" if count else "\na run has what it needs")
    if any("deploy/" in check.fix for check in checks) and not Path("deploy").is_dir():
        console.print("`kubedet cluster manifests` writes the folder deploy/")
    return checks
