"""Options of the commands that send a run to Kubeflow Pipelines: where to, and what."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pipelines.commands.options import add_overrides
from pipelines.forms import ENDS, PARALLELISM
from pipelines.sizes import SIZES
from trainer.configuration import parse_overrides
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.access import Access
    from pipelines.kubeflow import Server
    from pipelines.submission import Submission

_TEXTS = {
    "data_root": ("URI", "where the data are kept, e.g. s3://bucket/kubedet; with a volume: "
                  "/data/kubedet, unless another path below /data is named"),
    "source": ("URI", "images and boxes: sample (drawn by the program), coco:URI, coco:2017, voc:URI, "
               "openimages: (default: sample)"),
    "recipe": ("NAME", "see `kubedet recipes` (default: debug)"),
    "gate": ("RULE", "what a model must reach to be exported (default: the recipe's)"),
    "launcher": ("NAME", "kubernetes (PyTorchJob or TrainJob, as the cluster runs), pytorchjob, trainjob or "
                 "local (in the step's own pod) (default: kubernetes)"),
    "image": ("IMAGE", "container image of the training (default: the steps' own)"),
    "output": ("URI", "folder of the run (default: <data-root>/runs/<run id>)"),
    "credentials": ("SECRET", "Secret with the object store's keys (default: kubedet-object-store)"),
    "claim": ("PVC", "PersistentVolumeClaim that every pod mounts at /data"),
    "signing": ("SECRET", "Secret whose private.pem signs the exported model (default: kubedet-signing, if "
                "there is one)"),
    "registry": ("URL", "Kubeflow Model Registry that is told of the exported model (default: none)"),
}  # fmt: skip
_NUMBERS = {
    "nodes": "machines that train (default: 1)",
    "nproc": "training processes on each (default: one for each GPU, or one)",
    "gpus": "GPUs of each machine (default: 0)",
    "partitions": "pods that share the download, and then the sharding (default: 1, the quickest for all but "
    "big sets)",
}


def add_access(parser: argparse.ArgumentParser) -> None:
    """Declare where Kubeflow Pipelines is."""
    group = parser.add_argument_group(
        "Kubeflow Pipelines",
        "The token, where one is needed, is in the variable KFP_EXISTING_TOKEN, as for kfp itself; a pod's "
        "own is found. Without a host: the cluster around this process, or that of the kubeconfig.",
    )
    group.add_argument("--host", default="", metavar="URL", help="its API (default: $KFP_ENDPOINT)")
    group.add_argument(
        "--namespace",
        default="",
        metavar="NAME",
        help="your profile's, where several users share it (default: $KFP_NAMESPACE)",
    )
    group.add_argument("--ca", default="", metavar="FILE", help="certificate of the host's own authority")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare what to run: the pipeline's parameters, each with the default it has there."""
    group = parser.add_argument_group("what to run")
    for name, (metavar, meaning) in _TEXTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=meaning)
    for name, meaning in _NUMBERS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    add_sizes(group, "default: small for sample, large for coco:2017 and openimages:, else medium")
    add_overrides(group)
    group.add_argument(
        "--job", action="append", default=[], metavar="FIELD=VALUE",
        help="set one further field of the training job, e.g. memory_limit=64Gi or "
        "network.profile=rdma; may be given again; `kubedet job fields` says what there is",
    )  # fmt: skip
    group.add_argument(
        "--experiment", default="kubedet", metavar="NAME", help="experiment of the runs (default: kubedet)"
    )


def add_sizes(group: "argparse._ActionsContainer", default: str) -> None:
    """Declare how much the pods of the heavy steps ask for.

    Args:
        group: where the options belong.
        default: what is said of leaving them out.
    """
    told = "; ".join(f"{name}: {cpu} cores, {memory}" for name, (cpu, memory) in SIZES.items())
    group.add_argument(
        "--size", choices=SIZES, default="",
        help=f"what the pods that prepare, evaluate and export ask for: {told} ({default})",
    )  # fmt: skip
    group.add_argument("--step-cpu", default="", metavar="CORES", help="cores instead of the size's, e.g. 4")
    group.add_argument(
        "--step-memory", default="", metavar="AMOUNT", help="memory instead of the size's, e.g. 8Gi"
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    """Declare what of the pipeline is fixed when it is compiled."""
    group = parser.add_argument_group("the form of the pipeline", "Fixed when it is compiled.")
    group.add_argument(
        "--until", choices=[end for end in ENDS if end], default="",
        help="end there: `shards` makes the data ready and trains nothing",
    )  # fmt: skip
    group.add_argument(
        "--parallelism", type=int, default=PARALLELISM, metavar="N",
        help="pods that work on partitions at a time; 0 is no limit (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--deadline", type=int, default=0, metavar="SECONDS",
        help="end a run that takes longer (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--ttl", type=int, default=0, metavar="SECONDS",
        help="delete a run's pods and Workflow so long after its end (default: as the cluster is set up)",
    )  # fmt: skip


def access(options: argparse.Namespace) -> "Access":
    """Return where Kubeflow Pipelines is."""
    from pipelines.access import Access

    return Access.find(options.host, options.namespace, options.ca)


def connect(access: "Access") -> "Server":
    """Return the server that is to take a run, and warn where it is not the version that was tried.

    Raises:
        ConfigError: there is none, or it is too old.
        Unavailable: it does not answer.
    """
    from pipelines.kubeflow import Server

    server = Server(access)
    release = server.release()
    release.refuse()
    if remark := release.remark():
        print(f"warning: Kubeflow Pipelines: {remark}", file=sys.stderr)
    return server


def submission(options: argparse.Namespace, name: str) -> "Submission":
    """Return what the options ask for, checked.

    Args:
        options: of `add_run`, and `data_version`.
        name: of the run or schedule.

    Raises:
        ConfigError: naming all that cannot be run.
    """
    from pipelines import sizes
    from pipelines.submission import Submission

    size = options.size or sizes.of_source(options.source or "sample")
    given: dict[str, Any] = {
        "overrides": parse_overrides(options.overrides),
        "job": _job(options.job),
        "data_version": options.data_version,
        **sizes.request(size, options.step_cpu, options.step_memory),
    }
    plain = {name: getattr(options, name) for name in (*_TEXTS, *_NUMBERS)}
    parameters = {name: value for name, value in (plain | given).items() if value not in (None, "", {})}
    if options.partitions == 1:  # The form without partitions, which has no such parameter.
        del parameters["partitions"]
    asked = Submission(
        name, options.experiment, parameters, parallelism=options.parallelism, until=options.until,
        deadline=options.deadline, ttl=options.ttl,
    )  # fmt: skip
    asked.check()
    return asked


def _job(texts: list[str]) -> dict[str, Any]:
    """Read `field=value` texts as `kubedet job` does: what JobSpec says is text stays text."""
    from components.launchers.spec import JobSpec
    from pipelines.commands.job_options import set_field

    tree: dict[str, Any] = {}
    parse_overrides(texts, "--job")
    problems = [problem for text in texts for problem in set_field(tree, JobSpec, text)]
    if problems:
        raise ConfigError(
            "--job cannot be used:\n" + "\n".join(problems),
            fix="correct these; `kubedet job fields` says what each means",
        )
    return tree
