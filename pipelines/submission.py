"""What a run in a cluster is asked to do: checked before anything is sent, and how it is sent."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import yaml

from components import data_versions, jobs, launchers, model_registry, starting_weights
from components.launchers import kubernetes_names
from operations import retrain_condition
from operations.retention import pruning
from operations.tuning import space, study_name
from pipelines import checks, parameters, sizes
from pipelines.access import Access
from pipelines.compile import compile_pipeline
from pipelines.forms import Form
from trainer import storage
from trainer.base.errors import ConfigError, DataError, KubedetError, StorageError
from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import MINUTES
from trainer.data import sources
from trainer.evaluation.gate import parse, split_rules
from trainer.model import recipes

FILE = "pipeline.yaml"
"""Name of the compiled pipeline in the commands that are shown."""


@dataclass(frozen=True)
class Submission:
    """One run, or what a schedule runs again and again."""

    name: str
    """How people see it."""
    experiment: str
    """Name of the experiment it belongs to."""
    parameters: Mapping[str, Any]
    """Those of the pipeline that are given; the others have their defaults. A `claim` and
    `min_new_images` make other forms of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the form."""

    @property
    def form(self) -> Form:
        """The form of the pipeline that has these parameters; raises ConfigError if there is none."""
        conditional = "min_new_images" in self.parameters and not self.settings.get("until")
        return Form(volume="claim" in self.parameters, conditional=conditional, **self.settings)

    def check(self) -> None:
        """Refuse what a step would refuse, hours later.

        Raises:
            ConfigError: naming all that cannot be used.
        """
        checks.make_all(
            [
                self._check_form, self._check_recipe, self._check_search, self._check_job,
                self._check_settings, self._check_data_version, self._check_names, self._check_places,
            ]
        )  # fmt: skip

    def package(self) -> dict[str, Any]:
        """Return the compiled pipeline in the form that the API takes.

        Raises:
            StorageError: nothing can be written to the temporary folder.
        """
        spec, platform = yaml.safe_load_all(_compiled(self.form))
        return {"pipeline_spec": spec, "platform_spec": platform}

    def commands(self, access: Access) -> list[str]:
        """Return the command lines that do the same with `kfp` of version 2.17 or later.

        A token is none of their words: kfp finds it in the same variable.
        """
        run = ["kfp"]
        run += ["--endpoint", access.host] if access.host else []
        run += ["--namespace", access.namespace] if access.namespace else []
        run += ["run", "create", "--experiment-name", self.experiment, "--run-name", self.name]
        run += ["--package-file", FILE]
        run += [f"{name}={argument(value)}" for name, value in self.parameters.items()]
        compiled = ["kubedet", "cluster", "compile", *compile_options(self.form), "--output", FILE]
        return [shlex.join(compiled), shlex.join(run)]

    def _get(self, name: str) -> Any:
        of_form = Form(volume="claim" in self.parameters)
        return self.parameters.get(name, parameters.default(name, of_form))

    def _check_form(self) -> None:
        form = self.form
        what = f"run until {form.until}" if form.until else "search" if form.trials else ""
        strangers = [name for name in parameters.TRAINING if name in self.parameters] if what else []
        if strangers:
            raise ConfigError("\n".join(f"{name}: means nothing in a {what}" for name in strangers))

    def _check_recipe(self) -> None:
        overrides, launcher = self._get("overrides"), self._get("launcher")
        recipes.load(self._get("recipe"), overrides)
        known = launchers.LAUNCHERS.get(launcher)
        if overrides.get(MINUTES) and known and known.pods and not self.settings.get("trials"):
            raise ConfigError(
                f"{MINUTES}: means nothing to the launcher {launcher}: the speed of its pods is not measured",
                fix="set train.epochs, or train in the step itself with --launcher local",
            )

    def _check_search(self) -> None:
        if self.settings.get("trials"):
            recipe, overrides = self._get("recipe"), self._get("overrides")
            space.parse(self._get("space"), recipe, overrides, f"the space of {self.name}")
            study_name(self._get("study"), recipe)

    def _check_job(self) -> None:
        request = {name: self._get(name) for name in ("launcher", *jobs.PARAMETERS, "job")}
        jobs.Request.of(request, default_image="steps").spec(("train",))

    def _check_data_version(self) -> None:
        version = self._get("data_version")
        if version and version != data_versions.SCHEDULED_TIME:
            data_versions.check(version)

    def _check_settings(self) -> None:
        condition = retrain_condition.Condition(self._get("min_new_images"), self._get("min_drift"))
        keep, registry = self._get("prune"), self._get("registry")
        checks.make_all(
            [
                *(lambda rule=rule: parse(rule) for rule in split_rules(self._get("gate"))),
                condition.check,
                lambda: starting_weights.check_warm_start(self._get("warm_start")),
                lambda: pruning.check(keep) if keep else None,
                lambda: sizes.check(self._get("step_cpu"), self._get("step_memory")),
                lambda: model_registry.check_server(registry) if registry else None,
            ]
        )

    def _check_names(self) -> None:
        wrong = []
        for parameter in ("credentials", "claim", "signing", "notify"):
            try:
                kubernetes_names.dns_required(self.parameters.get(parameter, parameter))
            except ValueError as error:
                wrong.append(f"{parameter}: {error}")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def _check_places(self) -> None:
        """Refuse folders of the machine that this is typed on, which no pod has, and impossible buckets."""
        root = self._get("data_root")
        places = [("data_root", root), ("output", self._get("output"))]
        wrong = []
        try:
            places += [("source", place) for place in sources.places(self._get("source"))]
        except DataError as error:
            wrong.append(_line(error))
        mount = jobs.VOLUME if "claim" in self.parameters else ""
        way = f"use a bucket or a path below {mount}" if mount else "use a bucket, or a volume"
        for what, place in places:
            is_mounted = mount and f"{storage.absolute(place)}/".startswith(f"{mount}/")
            if place and storage.is_local(place) and not is_mounted:
                wrong.append(f"{what}: no pod finds {place}: {way}")
            try:
                storage.check_place(place)
            except StorageError as error:
                wrong.append(f"{what}: {_line(error)}")
        wrong += [] if root else ["data_root: is missing: where the data are kept, e.g. s3://bucket/kubedet"]
        if wrong:
            raise ConfigError("\n".join(wrong))


@cache
def _compiled(form: Form) -> str:
    """Return a form of the pipeline as YAML; compiling takes a second."""
    with temporary_folder() as folder:
        path = folder / FILE
        compile_pipeline(path, form)
        return path.read_text()


def _line(error: KubedetError) -> str:
    return f"{error.message}; {error.fix}"


def compile_options(form: Form) -> list[str]:
    """Return the options of `kubedet cluster compile` that make a form."""
    words = []
    for item in fields(form):
        value = getattr(form, item.name)
        if value != item.default:
            words += [f"--{item.name}"] if value is True else [f"--{item.name}", str(value)]
    return words


def argument(value: Any) -> str:
    """Write a parameter's value such that `kfp run create` reads the same value.

    It takes everything that looks like JSON, a number or a truth value for that.
    """
    is_json = not isinstance(value, str) or value.lower() in ("true", "false")
    for read in (json.loads, float) if not is_json else ():
        try:
            read(value)
            is_json = True
        except ValueError:
            continue
    return json.dumps(value) if is_json else value
