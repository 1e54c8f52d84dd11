"""The one pipeline: prepare the data, train (or search), evaluate, export if the gate passes, and clean up.

Every task of Kubeflow Pipelines has two pods that take ten seconds or more to start, so download and sharding
are one step, and work of a second is part of another step.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from kfp import compiler, dsl, kubernetes

from components import environment, jobs
from components.cleanup import cleanup
from components.environment import SECRET_KEYS, SIGNING_FOLDER
from components.evaluate import evaluate
from components.export import export
from components.hooks import TRAIN
from components.images import COMPONENT_IMAGE
from components.jobs import PARAMETERS, VOLUME
from components.prepare import prepare
from components.train import train
from operations.notifications import SECRET_KEYS as NOTICE_KEYS
from operations.tuning.best import best
from operations.tuning.trial import trial
from pipelines import CLEANUP, NAME, SEARCH, TITLES, parameters
from pipelines.parameters import CompileOptions, Values
from trainer import storage
from trainer.base.temporary_folders import temporary_folder

_WAITING = ("20m", "512Mi")  # CPU and memory of a step that starts something and waits.

_RUN_ID = dsl.PIPELINE_JOB_ID_PLACEHOLDER

SCHEDULED = dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER
"""Kubeflow's driver replaces it, in its own pod, by the time for which the run was scheduled."""

_RETRY_LIMIT = "2592000s"
"""For 30 days a step may be retried, and then run. Kubeflow's default of an hour would end a training that
started again after an eviction."""

_SETTINGS = ("recipe", "overrides", "credentials")  # Parameters of every step of the data and the training.

GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class _Graph:
    """Adds the steps to the pipeline that kfp is building."""

    values: Mapping[str, Any]  # The pipeline's parameters by name.
    options: CompileOptions

    def build(self) -> None:
        """Add all steps: the data, then a training or a search, and the clean-up around them."""
        options = self.options
        clean_up = cleanup(launcher=self._get("launcher"), run_id=_RUN_ID)
        self._notify(configure_pod(clean_up, CLEANUP[clean_up.name], *_WAITING))
        with dsl.ExitHandler(clean_up, name="steps"):
            settings = self._select("data_root", *_SETTINGS)
            own = self._select("source", "data_version", "prune") | {"scheduled": SCHEDULED}
            # Only conditional pipelines have this parameter.
            own |= {"min_new_images": self.values.get("min_new_images", 0)}
            data = prepare(trains=not options.until, **settings, **own)
            self._notify(self._step(data))
            if options.trials:
                settings |= self._select("study", "space")
                settings |= {"shards": data.outputs["shards"]}
                # Strings: kfp declares items of a list as strings, and its driver then refuses other types.
                numbers = [str(number) for number in range(options.trials)]
                with dsl.ParallelFor(numbers, name="trials", parallelism=options.parallelism) as number:
                    trained = self._step(
                        trial(number=number, trials=options.trials, gpus=options.gpus, **settings)
                    )
                    if options.gpus:
                        trained.set_accelerator_type(GPU).set_accelerator_limit(options.gpus)
                        # Processes of a node exchange data there; a container's default is 64 MB.
                        kubernetes.empty_dir_mount(trained, "shm", "/dev/shm", medium="Memory")  # noqa: S108
                self._step(best(ended=dsl.Collected(trained.output), **settings))
            elif options.conditional:
                with dsl.If(data.outputs["Output"] == TRAIN, name="pays"):
                    self._make_model(data.outputs["shards"])
            elif not options.until:
                self._make_model(data.outputs["shards"])

    def _get(self, name: str) -> Any:
        return self.values.get(name, "")

    def _select(self, *names: str) -> Values:
        return {name: self.values[name] for name in names}

    def _step(self, task: dsl.PipelineTask, *, waits: bool = False) -> dsl.PipelineTask:
        """Configure the pod of a step; one that `waits` only starts a job and waits."""
        cpu, memory = _WAITING if waits else (self._get("step_cpu"), self._get("step_memory"))
        # The name of a second task of one component has a number.
        configure_pod(task, (TITLES | SEARCH)[task.component_spec.name], cpu, memory)
        # Keys that are not in the Secret, or no such Secret, leave the variables unset.
        kubernetes.use_secret_as_env(task, self._get("credentials"), SECRET_KEYS, optional=True)
        if claim := self._get("claim"):
            kubernetes.mount_pvc(task, claim, VOLUME)
        return task

    def _notify(self, task: dsl.PipelineTask) -> dsl.PipelineTask:
        """Give the webhook's address to a step that can end the run."""
        return kubernetes.use_secret_as_env(task, self._get("notify"), NOTICE_KEYS, optional=True)

    def _make_model(self, shards: Any) -> None:
        request = self._select("launcher", *PARAMETERS)
        request |= {"claim": self._get("claim"), "default_image": COMPONENT_IMAGE}
        settings = self._select("job", "output", *_SETTINGS, "data_root", "warm_start")
        rules = self.values["gate"]
        # The run's id is a separate argument: Kubeflow replaces it only if it is the whole value.
        task = train(shards=shards, request=request, run_id=_RUN_ID, rules=rules, **settings)
        # The namespace's owner, not the run, limits what `job` may request.
        kubernetes.use_config_map_as_env(task, jobs.CONFIG_MAP, jobs.LIMITS, optional=True)
        model = self._step(task, waits=True).outputs["model"]
        scored = self._step(evaluate(model=model, rules=rules, **self._select("credentials")))
        self._notify(scored)
        with dsl.If(scored.outputs["Output"] == "pass", name="passed"):
            publishing = self._select("credentials", "signing", "registry")
            exported = self._notify(self._step(export(model=model, run_id=_RUN_ID, **publishing)))
            kubernetes.use_secret_as_volume(exported, self.values["signing"], SIGNING_FOLDER, optional=True)


def configure_pod(task: dsl.PipelineTask, title: str, cpu: Any, memory: Any) -> dsl.PipelineTask:
    """Set what the pods of all steps have in common: title, security, resource requests, retries."""
    task.set_display_name(title)
    kubernetes.use_field_path_as_env(task, environment.RUN_ID, f"metadata.labels['{environment.RUN_LABEL}']")
    # No user id: OpenShift assigns one to each namespace, and the image has one.
    kubernetes.set_security_context(task, run_as_non_root=True)
    # Requests, not limits: a step that needs more on a big set is slow, not killed.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # For pods that were deleted or evicted; the step retries other failures. Finished shards, checkpoints
    # and the training job are reused.
    task.set_retry(num_retries=3, backoff_duration="30s", backoff_factor=2, backoff_max_duration=_RETRY_LIMIT)
    # Kubeflow's cache does not notice changed sources or deleted data; the steps find finished work.
    return task.set_caching_options(False)


def pipeline(options: CompileOptions) -> Any:
    """Return kfp's pipeline with the parameters that these options leave open, ready to compile."""
    declared = list(parameters.of(options))

    def build(*values: Any) -> None:
        _Graph({item.name: value for item, value in zip(declared, values, strict=True)}, options).build()

    title = "Train an object detector"
    purpose = "Train a detector on a source of images, score it, and export it if it is good enough."
    if options.trials:
        title = "Search for hyper-parameters"
        purpose = "Search for the hyper-parameters with which a recipe trains best on a source of images."
    # kfp's compiler reads the signature, and takes the descriptions from the docstring.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(item.name, kind, default=item.default, annotation=item.kind) for item in declared]
    )
    lines = [f"    {item.name}: {item.description}" for item in declared]
    build.__doc__ = "\n".join([purpose, "", "Args:", *lines])
    # All three: Kubeflow's defaults are an hour each, and those of success and failure have priority.
    ttls = [f"ttl_seconds_after_{end}" for end in ("finished", "success", "failure")]
    limits = {"active_deadline_seconds": options.deadline, **dict.fromkeys(ttls, options.ttl)}
    config = dsl.PipelineConfig(**{name: value for name, value in limits.items() if value})
    return dsl.pipeline(name=NAME, display_name=title, pipeline_config=config)(build)


_PARAMETER_REFERENCE = re.compile(r"inputs\.parameter_values\['([^']+)'\]")
_INPUT_PARAMETER = "componentInputParameter"

Spec: TypeAlias = dict[str, Any]
"""A compiled pipeline's first document, or a part of it; functions change it."""


def compile_pipeline(path: Path, options: CompileOptions | None = None) -> None:
    """Compile the pipeline to a YAML file, which is replaced atomically."""
    storage.write_bytes(str(path.absolute()), compiled(options or CompileOptions()).encode(), sync=False)


@cache
def compiled(options: CompileOptions) -> str:
    """Return the pipeline as YAML; compiling takes a second.

    The output of kfp's compiler (2.17.0) is corrected: missing inputs of graphs, needless pods of conditions.
    """
    with temporary_folder() as folder:
        path = folder / "pipeline.yaml"  # kfp decides on the format by the suffix.
        compiler.Compiler().compile(pipeline(options), str(path))
        text = path.read_text()
    # The comment at the beginning lists the parameters for people.
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    documents = list(yaml.safe_load_all(text))
    spec = documents[0]
    pass_parameters(spec)
    inline_conditions(spec)
    for component in spec["components"].values():
        inputs = component.get("inputDefinitions", {})
        for items in (inputs.get("parameters", {}), inputs.get("artifacts", {})):
            for name in items.keys() & parameters.STEP_ARGUMENTS.keys():
                items[name]["description"] = parameters.STEP_ARGUMENTS[name]
    for name, parameter in spec["root"]["inputDefinitions"]["parameters"].items():
        if choices := parameters.TABLE[name].choices:
            parameter["literals"] = list(choices)  # kfp's compiler does not support them yet (2.17.0).
    return head + yaml.safe_dump_all(documents, sort_keys=True)


def pass_parameters(spec: Spec) -> None:
    """Declare the missing inputs of graphs: parameters that their tasks take from the enclosing graph.

    The compiler leaves out parameters that are used only in resource requests. The driver then refuses a
    nested graph that refers to an input it does not get.
    """
    pipeline_parameters = spec["root"]["inputDefinitions"]["parameters"]
    components = spec.get("components", {})
    for _ in components:  # Each round gets at least one level nearer to the root.
        for graph in [spec["root"], *components.values()]:
            for task in graph.get("dag", {}).get("tasks", {}).values():
                inner = components[task["componentRef"]["name"]]
                tasks = inner.get("dag", {}).get("tasks", {}).values()
                given = [item for of in tasks for item in of.get("inputs", {}).get("parameters", {}).values()]
                needed = {item[_INPUT_PARAMETER] for item in given if _INPUT_PARAMETER in item}
                for name in needed - set(task.get("inputs", {}).get("parameters", {})):
                    outer = name.removeprefix("pipelinechannel--")
                    if outer not in pipeline_parameters:
                        continue  # The item of the graph's loop.
                    source = {_INPUT_PARAMETER: outer if graph is spec["root"] else name}
                    task.setdefault("inputs", {}).setdefault("parameters", {})[name] = source
                    definitions = inner["inputDefinitions"].setdefault("parameters", {})
                    definitions[name] = {"parameterType": pipeline_parameters[outer]["parameterType"]}


def inline_conditions(spec: Spec) -> None:
    """Replace every conditional graph of one task by that task, under the same condition.

    `dsl.If` compiles to a task that holds an inner graph, and a cluster starts a pod for each graph. The
    specification also allows a condition on the task itself (PipelineTaskSpec.trigger_policy in Kubeflow's
    pipeline_spec.proto), which the task's driver checks.
    """
    components = spec.get("components", {})
    for graph in [spec["root"], *list(components.values())]:
        tasks = graph.get("dag", {}).get("tasks", {})
        for name, outer in list(tasks.items()):
            reference = outer["componentRef"]["name"]
            inner = components.get(reference, {}).get("dag", {}).get("tasks", {})
            if "condition" not in outer.get("triggerPolicy", {}) or len(inner) != 1:
                continue
            del tasks[name]
            ((own, task),) = inner.items()
            group, outer_inputs = components.pop(reference), outer.get("inputs", {})
            for kind, key in (("parameters", _INPUT_PARAMETER), ("artifacts", "componentInputArtifact")):
                for item, source in task.get("inputs", {}).get(kind, {}).items():
                    if key in source:
                        task["inputs"][kind][item] = outer_inputs[kind][source[key]]
            read = task.setdefault("inputs", {}).setdefault("parameters", {})
            component = components[task["componentRef"]["name"]]
            definitions = component["inputDefinitions"].setdefault("parameters", {})
            for item in _PARAMETER_REFERENCE.findall(outer["triggerPolicy"]["condition"]):
                # Only the driver reads it, for the condition.
                read[item] = outer_inputs["parameters"][item]
                definitions[item] = group["inputDefinitions"]["parameters"][item] | {"isOptional": True}
            before = {*outer.get("dependentTasks", []), *task.get("dependentTasks", [])}
            tasks[own] = task | {"triggerPolicy": outer["triggerPolicy"], "dependentTasks": sorted(before)}
