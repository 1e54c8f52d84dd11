"""A run or schedule to submit to a cluster: its checks, and the equivalent `kfp` commands."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import Any

import yaml

from components import data_job, jobs, model_registry
from components.launchers import kubernetes_names
from components.launchers.spec import JobSpec
from operations import retention
from operations.tuning import space
from pipelines import Access
from pipelines.compiler import compile_to_yaml
from pipelines.parameters import LARGE, MEDIUM, SMALL, check_all, check_sizes
from pipelines.pipeline import TRAINING_PARAMETERS, default_parameters
from pipelines.pipeline_run import CompileOptions, PipelineRun
from trainer import storage
from trainer.base.errors import ConfigError, DataError, StorageError, check_name
from trainer.data import source_names
from trainer.evaluation.gate import check_rules, split_rules
from trainer.model import recipes
from trainer.steps import starting_weights

_SEARCH_PARAMETERS = ("study", "space")
_LARGE_SOURCES = ("coco:2017", "openimages:")
PIPELINE_FILE = "pipeline.yaml"  # Name of the compiled pipeline in the commands that are shown.


@dataclass(frozen=True)
class Submission:
    """A run, or the run of a schedule."""

    name: str
    experiment: str
    parameters: Mapping[str, Any]
    """The pipeline's parameters without those that keep their default. `claim` and `min_new_images` also set
    compile options."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Further fields of CompileOptions.

    @classmethod
    def make(cls, run: PipelineRun, name: str) -> "Submission":
        """Return the checked submission of a run; by default, its name is made of the recipe and the time."""
        recipe, of_file = recipes.read_recipe(run.recipe) if run.recipe else ("", {})
        overrides = {**of_file, **(run.overrides or {})}
        cpu, memory = _default_requests(run.source)
        values: dict[str, Any] = {
            item: getattr(run, item)
            for item in default_parameters(volume=False)
            if item not in _SEARCH_PARAMETERS
        }
        values |= {"recipe": recipe, "overrides": overrides}
        values |= {"step_cpu": run.step_cpu or cpu, "step_memory": run.step_memory or memory}
        settings: dict[str, Any] = {"until": run.until, "deadline": run.deadline, "ttl": run.ttl}
        title = recipe or "debug"
        if run.trials:
            title = run.study or f"tune-{title}"
            content = storage.read_bytes(run.space) if run.space else ""
            searched = space.parse_space(
                content, recipe or "debug", overrides, run.space or f"the space of {title}"
            )
            values |= {"study": title, "space": space.format_space(searched, one_line=True), "gpus": None}
            settings |= {"trials": run.trials, "parallelism": run.parallelism, "gpus": run.gpus}
        elif run.study or run.space or run.parallelism is not None:
            raise ConfigError("study, space and parallelism belong to a search", fix="add trials")
        request = cls(
            name or f"{title}-{datetime.now():%Y%m%d-%H%M%S}",
            run.experiment,
            {item: value for item, value in values.items() if value not in (None, "", {})},
            {item: value for item, value in settings.items() if value},
        )
        request.check()
        return request

    @property
    def options(self) -> CompileOptions:
        """The compile options for these parameters; raises ConfigError if they contradict each other."""
        conditional = "min_new_images" in self.parameters and not self.settings.get("until")
        return CompileOptions(volume="claim" in self.parameters, conditional=conditional, **self.settings)

    def check(self) -> None:
        """Check the parameters now: a step would find their errors hours later."""
        get = self.get
        check_all(
            lambda: self.options,
            self._check_recipe,
            self.build_job,
            partial(check_rules, split_rules(get("gate"))),
            lambda: starting_weights.check_warm_start(get("warm_start")),
            lambda: retention.check_keep(get("prune")) if get("prune") else None,
            lambda: data_job.check_workers(get("data_workers")),
            lambda: check_sizes(get("step_cpu"), get("step_memory")),
            lambda: model_registry.check_server(get("registry")) if get("registry") else None,
            self._check_names_and_paths,
        )

    def build_job(self) -> JobSpec:
        """Return the training job of the run; raises ConfigError if it cannot be used."""
        request = {name: self.get(name) for name in ("launcher", *jobs.PARAMETERS, "job")}
        return jobs.Request(**request, steps_image="steps").build_spec(("train",))

    def package(self) -> Mapping[str, object]:
        """Return the compiled pipeline in the format of the API."""
        spec, platform = yaml.safe_load_all(compile_to_yaml(self.options))
        return {"pipeline_spec": spec, "platform_spec": platform}

    def commands(self, access: Access) -> list[str]:
        """Return equivalent commands for `kfp` 2.17 or later, which reads a token from the same variable."""
        run = ["kfp"]
        run += ["--endpoint", access.host] if access.host else []
        run += ["--namespace", access.namespace] if access.namespace else []
        run += ["run", "create", "--experiment-name", self.experiment, "--run-name", self.name]
        run += ["--package-file", PIPELINE_FILE]
        run += [f"{name}={format_argument(value)}" for name, value in self.parameters.items()]
        compiled = [
            "kubedet",
            "cluster",
            "compile",
            *compile_arguments(self.options),
            "--output",
            PIPELINE_FILE,
        ]
        return [shlex.join(compiled), shlex.join(run)]

    def get(self, name: str) -> Any:
        """Return the value of a parameter, or its default."""
        return self.parameters.get(name, default_parameters(volume="claim" in self.parameters)[name])

    def _check_recipe(self) -> None:
        recipe, overrides = self.get("recipe"), self.get("overrides")
        recipes.load(recipe, overrides)
        if self.settings.get("trials"):
            space.parse_space(self.get("space"), recipe, overrides, f"the space of {self.name}")
            check_name(self.get("study") or recipe, "study")

    def _check_names_and_paths(self) -> None:
        """Refuse parameters without effect, invalid names, and local folders, which pods cannot access."""
        until, mount = self.settings.get("until"), jobs.VOLUME if "claim" in self.parameters else ""
        kind = f"run until {until}" if until else "search" if self.settings.get("trials") else ""
        useless = [name for name in TRAINING_PARAMETERS if kind and name in self.parameters]
        problems = [f"{name}: has no effect in a {kind}" for name in useless]
        for name in ("credentials", "claim", "signing", "notify"):
            try:
                kubernetes_names.check_required_name(self.parameters.get(name, name))
            except ValueError as error:
                problems.append(f"{name}: {error}")
        root = self.get("data_root")
        if not root:
            problems.append("data_root: is missing: set it, e.g. to s3://bucket/kubedet")
        places = [("data_root", root), ("output", self.get("output"))]
        try:
            places += [("source", place) for place in source_names.source_uris(self.get("source"))]
        except DataError as error:
            problems.append(f"{error.message}; {error.fix}")
        remedy = f"use a bucket or a path below {mount}" if mount else "use a bucket, or a volume"
        for name, place in places:
            is_mounted = mount and f"{storage.absolute(place)}/".startswith(f"{mount}/")
            if place and storage.is_local(place) and not is_mounted:
                problems.append(f"{name}: pods cannot access {place}: {remedy}")
            try:
                storage.check_uri(place)
            except StorageError as error:
                problems.append(f"{name}: {error.message}; {error.fix}")
        if problems:
            raise ConfigError("\n".join(problems))


def _default_requests(source: str) -> tuple[str, str]:
    """Return the cores and memory that a source needs."""
    if source.startswith(_LARGE_SOURCES):
        return LARGE
    return SMALL if source in ("", "sample") or source.startswith("sample:") else MEDIUM


def compile_arguments(options: CompileOptions) -> list[str]:
    """Return the arguments of `kubedet cluster compile` for these options."""
    words = []
    for item in fields(options):
        value = getattr(options, item.name)
        if value != item.default:
            words += [f"--{item.name}"] if value is True else [f"--{item.name}", str(value)]
    return words


def format_argument(value: Any) -> str:
    """Format a value so that `kfp run create` parses it (as JSON, number or boolean) to the same value."""
    is_json = not isinstance(value, str) or value.lower() in ("true", "false")
    for read in (json.loads, float) if not is_json else ():
        try:
            read(value)
            is_json = True
        except ValueError:
            continue
    return json.dumps(value) if is_json else value
