"""The pipeline's compile options, and its parameters as options of commands and in the documentation."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from components import jobs, launchers
from components.environment import CREDENTIALS, SIGNING_NAME
from components.launchers import kubernetes_names, spec
from operations.notifications import NOTIFY
from trainer.base.errors import ConfigError, KubedetError
from trainer.model import recipes

REQUIRED = inspect.Parameter.empty  # The default of a parameter that has none.

Values: TypeAlias = dict[str, Any]
"""Values of the pipeline's parameters, or of a recipe's keys, by name."""

PARALLELISM = 16  # Default number of trials that train at the same time.

SIZES = {"small": ("500m", "2Gi"), "medium": ("2", "8Gi"), "large": ("6", "24Gi")}
"""Cores and memory that the pods of the heavy steps request. Too small a request packs steps onto a node that
cannot hold them; one too large stays pending forever."""

DEFAULT_SIZE = SIZES["small"]  # The requests in the compiled file.

_WORD = re.compile(r"`([^`\s]+|<[^`]+>)`")


@dataclass(frozen=True)
class CompileOptions:
    """Settings for pods, loops and limits, which Kubeflow creates before the parameters are known."""

    volume: bool = False  # Every step mounts the PersistentVolumeClaim that the parameter `claim` names.
    parallelism: int = PARALLELISM  # Trials that train at the same time; 0 is no limit.
    until: str = ""  # "shards" ends the pipeline when the data are ready; empty runs all steps.
    conditional: bool = False
    """Skip training if fewer images changed than `min_new_images`. The condition costs a pod."""
    trials: int = 0  # Trials of a search for hyper-parameters, in place of one training; 0 is no search.
    gpus: int = 0  # GPUs of each trial's pod. (kfp ignores a number that is a parameter here.)
    deadline: int = 0  # Seconds after which Kubeflow ends a run; 0 is no limit.
    ttl: int = 0  # Seconds after its end when a run's Workflow is deleted; 0 leaves it to the cluster.

    def __post_init__(self) -> None:
        limits = ("parallelism", "deadline", "ttl", "trials", "gpus")
        problems = [f"{key} {value} is less than zero" for key in limits if (value := getattr(self, key)) < 0]
        if self.until not in ("", "shards"):
            problems.append(f"until {self.until!r} is not a step to end at; use shards")
        if self.conditional and self.until:
            problems.append(f"conditional has no effect until {self.until}: no training follows")
        if self.trials and (self.until or self.conditional):
            other = f"until {self.until}" if self.until else "conditional"
            problems.append(f"{other} cannot be combined with a search, which trains trials")
        if self.parallelism != PARALLELISM and not self.trials:
            problems.append("parallelism has no effect without trials")
        if self.gpus and not self.trials:
            problems.append("gpus has no effect without trials: for a training it is a parameter")
        if problems:
            raise ConfigError("; ".join(problems), fix="correct these")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the pipeline. Texts are Markdown, without capital and full stop."""

    name: str
    kind: type  # str, int, float or dict, as Kubeflow has them.
    meaning: str
    default: Any = REQUIRED
    default_text: str = ""  # What an empty default means.
    submit_default: str = ""  # Default of `kubedet submit` and `schedule`, if it differs.
    metavar: str = ""  # Name of its value on a command line; empty if other options set it (--set, --job).
    choices: tuple[str, ...] = ()  # All valid values; the UI offers them as a list.
    only: str = ""  # The field of CompileOptions that must be set; empty is always.
    with_volume: Any = None  # The default of a pipeline with a volume, if it differs.
    trains: bool = True  # Whether only a pipeline with one training has it.
    local: Mapping[str, Any] | None = None
    """Fields that differ for `kubedet run`; None if it does not have the parameter."""

    @property
    def option(self) -> str:
        """The option's name on a command line."""
        return f"--{self.name.replace('_', '-')}"

    def help(self) -> str:
        """Return the help of its option."""
        default_text = self.submit_default or self.default_text
        if not default_text and self.with_volume:
            default_text = f"with a volume {self.with_volume}"
        if not default_text and self.default is not REQUIRED:
            default_text = str(self.default)
        text = self.meaning + (f" (default: {default_text})" if default_text else "")
        # In a terminal only words with spaces need quotes.
        return _WORD.sub(r"\1", text)


def _of_job(name: str, **settings: Any) -> Parameter:
    kind = int if spec.FIELDS[name].annotation is int else str
    return Parameter(name, kind, spec.meaning(name), spec.FIELDS[name].default, metavar="N", **settings)


_ALL = (
    Parameter(
        "data_root",
        str,
        "URI under which data and runs are stored, e.g. `s3://bucket/kubedet`; every step must reach it",
        metavar="URI",
        with_volume=f"{jobs.VOLUME}/kubedet",
        trains=False,
        local={
            "default": "./data_root",
            "with_volume": None,
            "meaning": "where data is kept: a folder or e.g. `s3://bucket/prefix`",
        },
    ),
    Parameter(
        "claim",
        str,
        f"PersistentVolumeClaim that every pod mounts at `{jobs.VOLUME}`",
        metavar="PVC",
        only="volume",
        trains=False,
    ),
    Parameter(
        "source",
        str,
        "images and boxes: `sample` (generated), `coco:URI`, `coco:2017`, `voc:URI`, "
        "`yolo:URI`, `openimages:`, or the URI or path of a COCO, VOC or YOLO folder",
        "sample",
        metavar="URI",
        trains=False,
        local={},
    ),
    Parameter(
        "recipe",
        str,
        "a whole configuration; `kubedet recipes list` shows them",
        "debug",
        metavar="NAME",
        choices=tuple(recipes.RECIPES),
        trains=False,
        local={
            "meaning": "a whole configuration: a name (`kubedet recipes list` shows them), or a file as "
            "`kubedet tune` writes it"
        },
    ),
    Parameter(
        "overrides",
        dict,
        'values that replace those of the recipe, e.g. `{"train.epochs": 10}`',
        {},
        trains=False,
        local={},
    ),
    Parameter(
        "study",
        str,
        "name of the search; an existing name continues that search",
        "",
        "`tune-<recipe>`",
        only="trials",
        trains=False,
    ),
    Parameter(
        "space",
        str,
        "keys to search and their ranges, as YAML, e.g. `{train.lr: {low: 0.001, high: 0.1}}`",
        "",
        "the recipe's own",
        only="trials",
        trains=False,
    ),
    Parameter(
        "gate",
        str,
        "rules that a model must pass to be exported, e.g. `coco/AP50 >= 0.5`, separated by commas",
        "",
        "the recipe's",
        metavar="RULE",
        local={},
    ),
    Parameter(
        "min_new_images",
        int,
        "skip training (and succeed) if fewer images were added, changed or removed since the current "
        "version of the model",
        1,
        submit_default="none: a run always trains",
        metavar="N",
        only="conditional",
        local={"default": 0, "submit_default": "0: always train"},
    ),
    Parameter(
        "warm_start",
        str,
        "`champion` starts from the weights of the current version of the model, and trains a quarter of the "
        "recipe's epochs unless `train.epochs` is set",
        "",
        "none: start as the recipe specifies",
        metavar="FROM",
        local={},
    ),
    Parameter(
        "prune",
        int,
        "how many of the newest runs to keep: when the data is ready, older runs, versions, shards and "
        "images that nothing needs are deleted under the data root",
        0,
        "0: keep all",
        metavar="N",
        trains=False,
    ),
    Parameter(
        "data_workers",
        int,
        "number of pods that share download and sharding; 1 works in the pod of the step",
        1,
        metavar="N",
        trains=False,
    ),
    Parameter(
        "launcher",
        str,
        "what runs the training and data workers: "
        + ", ".join(f"`{name}` ({it.meaning})" for name, it in launchers.LAUNCHERS.items()),
        launchers.DEFAULT,
        metavar="NAME",
        choices=tuple(launchers.LAUNCHERS),
        trains=False,
    ),
    _of_job("nodes"),
    _of_job(
        "nproc",
        local={
            "default": 2,
            "default_text": "one for each GPU; 2 without GPUs",
            "meaning": "training processes",
        },
    ),
    _of_job("gpus"),
    Parameter("image", str, "container image of the training", "", "the steps' own", metavar="IMAGE"),
    Parameter(
        "job",
        dict,
        'further fields of the training job (`kubedet job fields`), e.g. `{"memory_limit": "64Gi"}`',
        {},
        trains=False,
    ),
    Parameter(
        "output",
        str,
        "URI of the run's folder",
        "",
        "`<data_root>/runs/<run id>`",
        metavar="URI",
        local={"default": "./runs", "default_text": "", "metavar": "DIR", "meaning": "where runs go"},
    ),
    Parameter(
        "credentials",
        str,
        "Secret with the object store's keys, which are all optional",
        CREDENTIALS,
        metavar="SECRET",
        trains=False,
    ),
    Parameter(
        "data_version",
        str,
        "name for the current data; an existing name restores its data",
        "",
        "none",
        metavar="NAME",
        trains=False,
    ),
    Parameter(
        "step_cpu",
        str,
        "CPU request of the pods that process the data or the model, e.g. 2 or 500m",
        DEFAULT_SIZE[0],
        submit_default="the size's",
        metavar="CORES",
        trains=False,
    ),
    Parameter(
        "step_memory",
        str,
        "their memory request, e.g. 8Gi",
        DEFAULT_SIZE[1],
        submit_default="the size's",
        metavar="AMOUNT",
        trains=False,
    ),
    Parameter(
        "signing",
        str,
        "Secret whose `private.pem` signs the exported model; the default Secret is optional",
        SIGNING_NAME,
        metavar="SECRET",
    ),
    Parameter(
        "registry",
        str,
        "URL of the Kubeflow Model Registry that registers the exported model",
        "",
        "none",
        metavar="URL",
    ),
    Parameter(
        "notify",
        str,
        "Secret whose `url` is the webhook to notify when the run ends; optional",
        NOTIFY,
        metavar="SECRET",
        trains=False,
    ),
)

TABLE: Mapping[str, Parameter] = {item.name: item for item in _ALL}  # The parameters by name.

LOCAL: Mapping[str, Parameter] = {
    item.name: replace(item, **item.local) for item in _ALL if item.local is not None
}
"""The parameters of `kubedet run`."""

TRAINING = tuple(item.name for item in _ALL if item.trains)
"""Names of those that only a pipeline with one training has."""


def default(name: str, *, volume: bool = False) -> Any:
    """Return a parameter's default, of a pipeline with a volume or without; "" if there is none."""
    item = TABLE[name]
    value = (volume and item.with_volume) or item.default
    return "" if value is REQUIRED else value


def check_sizes(cpu: str, memory: str) -> None:
    """Raise ConfigError for cores and memory that Kubernetes does not accept, or that are too small."""
    problems = []
    for name, text, least in (("step_cpu", cpu, "10m"), ("step_memory", memory, "64Mi")):
        try:
            if kubernetes_names.amount(kubernetes_names.quantity(text)) < kubernetes_names.amount(least):
                raise ValueError(f"{text!r} is less than {least}")
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems), fix="e.g. step_cpu 500m or 4, step_memory 8Gi")


def check_all(*checks: Callable[[], object]) -> None:
    """Make every check, which raises a KubedetError if it finds a problem; raise one with all problems."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except KubedetError as error:
            lines = error.message.splitlines()
            if len(lines) > 1 and lines[1].startswith("  "):
                problems += lines[1:]  # Without its heading.
            else:
                lines[-1] += f"; {error.fix}" if error.fix else ""
                problems += [f"  {line}" for line in lines]
    if problems:
        raise ConfigError("these settings cannot be used:\n" + "\n".join(problems), fix="correct these")
