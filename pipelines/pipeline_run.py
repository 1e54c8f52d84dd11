"""The parameters of a run in Kubeflow, for `kubedet submit` and `schedule create`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from trainer.base.errors import ConfigError

PARALLELISM = 16  # Default number of trials that train at the same time.


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """The parameters of a run, with the pipeline's names; None or empty means the pipeline's default.

    Args:
        data_root: URI under which data and runs are stored, e.g. s3://bucket/kubedet; every step must reach
            it (default: with a claim /data/kubedet)
        claim: PersistentVolumeClaim that every pod mounts at /data
        source: the data set: sample (generated), coco:URI, coco:2017, voc:URI, yolo:URI, openimages:, or the
            URI or path of a COCO, VOC or YOLO folder (default: sample)
        recipe: the configuration: a recipe's name (see `kubedet recipes list`), or a recipe file, such as
            `kubedet tune` writes (default: debug)
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated; `kubedet recipes
            explain` lists the keys
        gate: rules that a model must pass to be exported, e.g. 'coco/AP50 >= 0.5', separated by commas
            (default: the recipe's)
        min_new_images: skip training (and succeed) if fewer images were added, changed or removed since the
            current version of the model (default: always train)
        warm_start: champion: start from the weights of the model's current version, and train for a quarter
            of the recipe's epochs unless train.epochs is set
        prune: number of newest runs to keep: when the data is ready, older runs, model versions, shards and
            images that are no longer needed are deleted from the data root (default: 0: keep all)
        data_workers: number of pods that share download and sharding; 1: use only the step's own pod
            (default: 1)
        launcher: where the training and data workers run: local (in the step's own pod), kubernetes (in a
            PyTorchJob or a TrainJob, whichever the cluster supports), pytorchjob or trainjob (default:
            kubernetes)
        nodes: number of training pods, each on its own node (default: 1)
        nproc: processes on each node; 0: one per GPU, or one without GPUs (default: 0)
        gpus: GPUs per node, or of each trial's pod (default: 0)
        image: container image of the training (default: the steps' own)
        job: set another field of the training job, e.g. memory_limit=64Gi or network.profile=rdma; may be
            repeated; `kubedet job fields` lists the fields
        output: URI of the run folder (default: DATA_ROOT/runs/RUN_ID)
        credentials: Secret with the object store's keys, which are all optional (default:
            kubedet-object-store)
        step_cpu: CPU request of the pods that process the data or the model, e.g. 2 or 500m (default: 500m
            for sample, 6 for coco:2017 and openimages:, else 2)
        step_memory: memory request of these pods, e.g. 8Gi (default: 2Gi for sample, 24Gi for coco:2017 and
            openimages:, else 8Gi)
        signing: Secret whose private.pem signs the exported model; the default Secret is optional (default:
            kubedet-signing)
        registry: URL of the Kubeflow Model Registry that registers the exported model
        notify: Secret whose url is the webhook to notify when the run ends; optional (default:
            kubedet-notify)
        trials: search hyperparameters with this many trials, each in its own pod, instead of training once
        parallelism: number of concurrent trials; 0: no limit (default: 16)
        study: name of the search; an existing name continues that search (default: tune-RECIPE)
        space: YAML file with the keys to search and their ranges (default: the recipe's search space)
        until: last step of the run: with shards, the run ends when the shards are written, without training
        deadline: end a run that takes longer; 0: never
        ttl: delete a run's pods and Workflow this long after it ends; 0: the cluster's setting
        experiment: experiment that contains the runs
    """

    __pydantic_config__: ClassVar = {"revalidate_instances": "always"}

    data_root: Annotated[str, "URI"] = ""
    claim: Annotated[str, "PVC"] = ""
    source: Annotated[str, "URI"] = ""
    recipe: Annotated[str, "NAME"] = ""
    overrides: Annotated[Mapping[str, object] | None, "KEY=VALUE"] = None
    gate: Annotated[str, "RULES"] = ""
    min_new_images: Annotated[int, Ge(0)] | None = None
    warm_start: Annotated[str, "FROM"] = ""
    prune: int | None = None
    data_workers: Annotated[int, Ge(1)] | None = None
    launcher: Annotated[str, "NAME"] = ""
    nodes: int | None = None
    nproc: int | None = None
    gpus: int | None = None
    image: Annotated[str, "IMAGE"] = ""
    job: Annotated[Mapping[str, object] | None, "FIELD=VALUE"] = None
    output: Annotated[str, "URI"] = ""
    credentials: Annotated[str, "SECRET"] = ""
    step_cpu: Annotated[str, "CORES"] = ""
    step_memory: Annotated[str, "AMOUNT"] = ""
    signing: Annotated[str, "SECRET"] = ""
    registry: Annotated[str, "URL"] = ""
    notify: Annotated[str, "SECRET"] = ""
    trials: Annotated[int, Ge(0)] = 0
    parallelism: int | None = None
    study: Annotated[str, "NAME"] = ""
    space: Annotated[str, "FILE"] = ""
    until: Literal["shards"] | None = None
    deadline: Annotated[int, "SECONDS"] = 0
    ttl: Annotated[int, "SECONDS"] = 0
    experiment: Annotated[str, "NAME"] = "kubedet"


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Settings that are fixed when the pipeline is compiled, before the parameters of a run are known.

    Args:
        volume: keep the data on a shared volume: every step mounts the PersistentVolumeClaim of the parameter
            `claim` at /data
        conditional: skip training if fewer images have changed than the run's parameter `min_new_images`;
            the condition needs an additional pod
        until: last step of the run: with `shards`, the run ends when the shards are written, without training
        trials: search hyperparameters with this many trials, like `kubedet tune`
        parallelism: number of concurrent trials; 0: no limit
        gpus: GPUs of each trial's pod
        deadline: end a run that takes longer; 0: never
        ttl: delete a run's pods and Workflow this long after it ends; 0: the cluster's setting
    """

    volume: bool = False
    conditional: bool = False
    until: Literal["shards"] | None = None
    trials: int = 0
    parallelism: int = PARALLELISM
    gpus: int = 0  # kfp ignores a number that is a parameter here.
    deadline: Annotated[int, "SECONDS"] = 0
    ttl: Annotated[int, "SECONDS"] = 0

    def __post_init__(self) -> None:
        limits = ("parallelism", "deadline", "ttl", "trials", "gpus")
        problems = [f"{key} {value} is less than zero" for key in limits if (value := getattr(self, key)) < 0]
        if self.until not in (None, "shards"):
            problems.append(f"until {self.until!r} is not a step that a run can end with; use shards")
        if self.conditional and self.until:
            problems.append(f"conditional has no effect with until {self.until}, because no training follows")
        if self.trials and (self.until or self.conditional):
            other = f"until {self.until}" if self.until else "conditional"
            problems.append(f"{other} cannot be combined with a search, which trains trials")
        if self.parallelism != PARALLELISM and not self.trials:
            problems.append("parallelism has no effect without trials")
        if self.gpus and not self.trials:
            problems.append("gpus has no effect without trials: set the parameter gpus of the run")
        if problems:
            raise ConfigError("; ".join(problems), fix="correct these")
