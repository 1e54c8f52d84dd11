"""`kubedet doctor`: checks for what a run needs."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.commands import Commands, option
from pipelines.commands import options as shared
from pipelines.parameters import DEFAULT_SIZE, SIZES, check_sizes
from trainer.base.errors import EXIT_FAILURE, ConfigError, KubedetError
from trainer.base.safe_text import whole_number

if TYPE_CHECKING:
    from trainer.launching.doctor import Check, Needs

_ON_MACHINE = ("local", "data_root", "gpus", "nodes", "output", "command")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Check the requirements of a run in the cluster of KUBECONFIG, or with --local those of "
        "`kubedet run` on this machine. Exit code 1 if something is missing.",
    )
    option(parser, "--local", "check only this machine")
    option(parser, "--data-root URI", "write, read and delete a small file there, from this machine")
    option(parser, "--gpus N", "GPUs per machine", 0, least=0)
    option(parser, "-o --output text|json", "default: text", "text")
    cluster = parser.add_argument_group("in a cluster")
    option(cluster, "-n --namespace NAME", "default: KUBECONFIG's")
    option(cluster, "--credentials SECRET", "Secret with the object store's keys")
    option(cluster, "--claim PVC", "PersistentVolumeClaim of the data root")
    option(cluster, "--nodes N", "number of machines of a job", 1, least=1)
    option(
        cluster,
        "--resource NAME[=N]...",
        "devices per machine, e.g. rdma/hca=1; without a number, print the available devices",
    )
    text = "Kueue LocalQueue: check that it admits jobs and that Kueue manages their kinds"
    option(cluster, "--queue NAME", text)
    shared.add_sizes(cluster, "default: not checked")
    option(cluster, "--host URL", "Kubeflow Pipelines' API (default: $KFP_ENDPOINT)")
    option(cluster, "--ca FILE", "CA certificate of that host")
    pods = parser.add_argument_group("in the pods of a job")
    text = "check the pods of a running job: /dev/shm, network interfaces, GPUs, memlock, RDMA"
    option(pods, "--job NAME", text)
    option(pods, "--shared-memory SIZE", "required /dev/shm, e.g. 8Gi")
    option(pods, "--interface NAME", "network interface of NCCL, e.g. net1")
    option(pods, "--rdma", "an RDMA device and unlimited locked memory")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from trainer.launching import doctor as machine

    reason, useless = "needs --job", [] if options.job else ["shared_memory", "interface", "rdma"]
    if options.local:
        reason = "has no effect with --local"
        useless = [name for name in vars(options) if name not in _ON_MACHINE]
    problems = [f"--{name.replace('_', '-')} {reason}" for name in useless if getattr(options, name)]
    resources = {"nvidia.com/gpu": options.gpus} if options.gpus else {}
    for text in options.resource:
        name, equals, number = text.partition("=")
        count = whole_number(number) if equals else 0
        if name and count is not None:
            resources[name] = count
        else:
            problems.append(f"--resource {text!r} is not NAME or NAME=N")
    cpu, memory = SIZES[options.size] if options.size else ("", "")
    step = {"cpu": options.step_cpu or cpu, "memory": options.step_memory or memory}
    try:
        check_sizes(step["cpu"] or DEFAULT_SIZE[0], step["memory"] or DEFAULT_SIZE[1])
        shared_memory = machine.size(options.shared_memory or "0")
    except ConfigError as error:
        problems += error.message.splitlines()
    if problems:
        raise ConfigError("; ".join(problems), fix="see `kubedet doctor --help`")
    needs = machine.Needs(options.gpus, options.rdma, options.interface, shared_memory, options.data_root)
    results = machine.check_machine(needs) if options.local else _cluster(options, resources, step, needs)
    checks = machine.report(results, as_json=options.output == "json")
    missing = sum(check.state == "missing" for check in checks)
    if options.output == "text":
        print(f"\n{missing} missing" if missing else "\na run has what it needs")
    return EXIT_FAILURE if missing else 0


def _cluster(
    options: argparse.Namespace, resources: dict[str, int], step: dict[str, str], needs: "Needs"
) -> "Iterator[Check]":
    from components import doctor
    from components.launchers.cluster.backend import ClusterBackend
    from pipelines import HOSTS, Access
    from trainer.launching.doctor import Check, writable

    try:
        backend = ClusterBackend.connect(options.namespace)
        yield from doctor.check_cluster(
            backend,
            nodes=options.nodes,
            resources=resources,
            secret=options.credentials,
            claim=options.claim,
            step={name: text for name, text in step.items() if text},
        )
        if options.queue:
            yield from doctor.check_queue(backend, options.queue)
        if options.job:
            yield from doctor.check_pods(backend, options.job, needs)
    except KubedetError as error:
        yield Check("cluster", "missing", error.message, error.fix)
    if options.data_root:
        yield writable(options.data_root)
    title, access = "Kubeflow Pipelines", Access.find(options.host, ca=options.ca)
    if not access.host:
        yield Check(title, "ok", f"not checked: neither --host nor {HOSTS[0]} names it")
        return
    from pipelines import preflight  # kfp, which takes a while.
    from pipelines.kubeflow import Server, check_version

    yield preflight.image()
    try:
        tag = Server(access).version
        warning = check_version(tag)
    except KubedetError as error:
        yield Check(title, "missing", error.message, error.fix)
        return
    fix = "run the recipe debug to check whether it works there"
    yield Check.ok_if(not warning, title, warning or f"{tag} at {access.host}", fix)
