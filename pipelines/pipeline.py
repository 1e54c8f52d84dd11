"""The pipeline: download, convert to shards, train (or search), evaluate, and export if the gate passes.

One function defines all variants, which `CompileOptions` selects. A run has two pods for each task, and
one for each group of tasks.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cache, wraps
from typing import Any

from kfp import dsl, kubernetes

from components import environment, jobs, launchers
from components.cleanup import cleanup
from components.convert_to_shards import convert_to_shards
from components.download import download
from components.environment import CREDENTIALS, SECRET_KEYS, SIGNING_FOLDER, SIGNING_NAME
from components.evaluate import evaluate
from components.export import export
from components.hooks import TRAIN
from components.images import COMPONENT_IMAGE
from components.train import train
from operations.notifications import SECRET_KEYS as NOTIFY_KEYS
from operations.notifications import WEBHOOK_NAME
from operations.tuning.best import best
from operations.tuning.trial import trial
from pipelines import CLEANUP_TITLE, PIPELINE_NAME, SEARCH_TITLES, STEP_TITLES
from pipelines.parameters import SMALL
from pipelines.pipeline_run import CompileOptions

GPU = "nvidia.com/gpu"

_RUN_ID = dsl.PIPELINE_JOB_ID_PLACEHOLDER
_REQUIRED: Any = inspect.Parameter.empty
_IDLE_REQUESTS = ("20m", "512Mi")  # CPU and memory of a step that only waits.
_MAX_RETRY_TIME = "2592000s"
"""Retries of a step may take up to 30 days. Kubeflow's default of an hour would end a training run that was
restarted after an eviction."""


TRAINING_PARAMETERS = (
    "nodes", "nproc", "gpus", "image", "output", "warm_start", "gate", "min_new_images",
    "signing", "registry",
)  # fmt: skip
"""Parameters that only a pipeline with a training step has."""


def make_pipeline(options: CompileOptions) -> Any:
    """Return the variant of the pipeline that the options select, as a function that kfp can compile."""

    def pipeline(
        claim: str = _REQUIRED if options.volume else "",
        data_root: str = f"{jobs.VOLUME}/kubedet" if options.volume else _REQUIRED,
        source: str = "sample",
        recipe: str = "debug",
        overrides: dict = {},  # noqa: B006 - kfp writes it into the compiled file.
        min_new_images: int = 1 if options.conditional else 0,
        prune: int = 0,
        data_workers: int = 1,
        launcher: str = launchers.DEFAULT,
        nodes: int = 1,
        nproc: int = 0,
        gpus: int = 0,
        image: str = "",
        job: dict = {},  # noqa: B006
        output: str = "",
        warm_start: str = "",
        gate: str = "",
        signing: str = SIGNING_NAME,
        registry: str = "",
        study: str = "",
        space: str = "",
        credentials: str = CREDENTIALS,
        notify: str = WEBHOOK_NAME,
        step_cpu: str = SMALL[0],
        step_memory: str = SMALL[1],
    ) -> None:
        """Train a detector on a source of images, score it, and export it if it is good enough.

        Args:
            claim: PersistentVolumeClaim that every pod mounts at /data.
            data_root: URI under which data and runs are stored; every step must reach it.
            source: the data set: sample, coco:URI, coco:2017, voc:URI, yolo:URI or openimages:.
            recipe: name of the configuration.
            overrides: configuration values that replace the recipe's values.
            min_new_images: skip training if fewer images changed since the current model version.
            prune: number of newest runs to keep when the data is ready; 0: keep all.
            data_workers: number of pods that share download and sharding.
            launcher: where the training runs: local, kubernetes, pytorchjob or trainjob.
            nodes: number of training pods.
            nproc: processes on each node; 0: one per GPU.
            gpus: GPUs per node.
            image: container image of the training; empty: the image of the steps.
            job: further fields of the training job.
            output: URI of the run folder; empty: a folder in the data root.
            warm_start: champion: start from the weights of the current model version.
            gate: rules that a model must pass to be exported; empty: the recipe's rules.
            signing: Secret whose private.pem signs the exported model; the default Secret is optional.
            registry: URL of the Kubeflow Model Registry that registers the exported model.
            study: name of the search; an existing name continues it.
            space: keys to search and their ranges, as YAML; empty: the recipe's search space.
            credentials: Secret with the object store's keys, which are all optional.
            notify: Secret whose url is the webhook to notify when the run ends; optional.
            step_cpu: CPU request of the pods that process the data or the model.
            step_memory: memory request of these pods.
        """

        def step(task: dsl.PipelineTask, cpu: Any = step_cpu, memory: Any = step_memory) -> dsl.PipelineTask:
            """Configure a task's pod: object store keys, volume, resources."""
            kubernetes.use_secret_as_env(task, credentials, SECRET_KEYS, optional=True)
            if claim:
                kubernetes.mount_pvc(task, claim, jobs.VOLUME)
            return configure_pod(task, (STEP_TITLES | SEARCH_TITLES)[task.component_spec.name], cpu, memory)

        def add_webhook(task: dsl.PipelineTask) -> dsl.PipelineTask:
            """Give a task the webhook's URL, so that it can report the end of the run."""
            return kubernetes.use_secret_as_env(task, notify, NOTIFY_KEYS, optional=True)

        def add_job_limits(task: dsl.PipelineTask) -> dsl.PipelineTask:
            """Pass the ConfigMap with the namespace's limits for `job` to a task."""
            return kubernetes.use_config_map_as_env(task, jobs.CONFIG_MAP, jobs.LIMITS, optional=True)

        data_job = {
            "data_workers": data_workers,
            "launcher": launcher,
            "job": job,
            "claim": claim,
            "run_id": _RUN_ID,
            "steps_image": COMPONENT_IMAGE,
            "cpu": step_cpu,
            "memory": step_memory,
        }
        clean_up = cleanup(launcher=launcher, run_id=_RUN_ID)
        add_webhook(configure_pod(clean_up, CLEANUP_TITLE["cleanup"], *_IDLE_REQUESTS))
        with dsl.ExitHandler(clean_up, name="steps"):
            raw = download(
                source=source,
                recipe=recipe,
                overrides=overrides,
                data_root=data_root,
                min_new_images=min_new_images,
                trains=not options.until,
                prune=prune,
                credentials=credentials,
                **data_job,
            )
            add_job_limits(add_webhook(step(raw)))
            with dsl.If(raw.outputs["Output"] == TRAIN, "is-new") if options.conditional else nullcontext():
                shards = convert_to_shards(
                    raw=raw.outputs["raw"], prune=prune, credentials=credentials, **data_job
                )
                add_job_limits(step(shards))
                if options.until:
                    return
                if options.trials:
                    add_search(options, step, shards.outputs["shards"], study, space, credentials)
                    return
                trained = train(
                    shards=shards.outputs["shards"],
                    launcher=launcher,
                    nodes=nodes,
                    nproc=nproc,
                    gpus=gpus,
                    image=image,
                    steps_image=COMPONENT_IMAGE,
                    job=job,
                    claim=claim,
                    output=output,
                    run_id=_RUN_ID,
                    gate=gate,
                    warm_start=warm_start,
                    credentials=credentials,
                )
                add_job_limits(step(trained, *_IDLE_REQUESTS))
                model = trained.outputs["model"]
                scores = add_webhook(step(evaluate(model=model, gate=gate, credentials=credentials)))
                with dsl.If(scores.outputs["Output"] == "pass", name="passed"):
                    exported = export(
                        model=model,
                        signing=signing,
                        registry=registry,
                        run_id=_RUN_ID,
                        credentials=credentials,
                    )
                    add_webhook(step(exported))
                    kubernetes.use_secret_as_volume(exported, signing, SIGNING_FOLDER, optional=True)

    only = dict.fromkeys(TRAINING_PARAMETERS, not (options.until or options.trials))
    only |= {"claim": options.volume, "min_new_images": options.conditional}
    only |= {"study": bool(options.trials), "space": bool(options.trials)}
    # Set all three: each defaults to an hour, and those for success and failure take precedence.
    limits = {f"ttl_seconds_after_{end}": options.ttl for end in ("finished", "success", "failure")}
    limits |= {"active_deadline_seconds": options.deadline}
    config = dsl.PipelineConfig(**{name: value for name, value in limits.items() if value})
    title = "Search for hyperparameters" if options.trials else "Train an object detector"
    decorate = dsl.pipeline(name=PIPELINE_NAME, display_name=title, pipeline_config=config)
    return decorate(without_parameters(pipeline, [name for name, present in only.items() if not present]))


def add_search(
    options: CompileOptions, step: Callable[..., Any], shards: Any, study: Any, space: Any, credentials: Any
) -> None:
    """Add a hyperparameter search: a task for each trial, and a task that chooses the best trial."""
    settings = {"shards": shards, "study": study, "space": space, "credentials": credentials}
    # Strings: kfp declares items of a list as strings, and its driver then refuses other types.
    numbers = [str(number) for number in range(options.trials)]
    with dsl.ParallelFor(numbers, name="trials", parallelism=options.parallelism) as number:
        trained = step(trial(number=number, trials=options.trials, gpus=options.gpus, **settings))
        if options.gpus:
            trained.set_accelerator_type(GPU).set_accelerator_limit(options.gpus)
            # The processes of a node exchange data in /dev/shm, which by default has only 64 MB.
            kubernetes.empty_dir_mount(trained, "shm", "/dev/shm", medium="Memory")  # noqa: S108
    step(best(ended=dsl.Collected(trained.output), **settings))


def configure_pod(task: dsl.PipelineTask, title: str, cpu: Any, memory: Any) -> dsl.PipelineTask:
    """Set the common options of all pods: title, security, resource requests, retries."""
    task.set_display_name(title)
    kubernetes.use_field_path_as_env(task, environment.RUN_ID, f"metadata.labels['{environment.RUN_LABEL}']")
    # Set no user id: OpenShift assigns one per namespace, and elsewhere the image's user is used.
    kubernetes.set_security_context(task, run_as_non_root=True)
    # Requests, not limits: a step may use more for a large dataset, and is not killed at a limit.
    task.set_cpu_request(cpu).set_memory_request(memory)
    # kfp 2.17 does not pass parameters of resource requests into groups, and its driver then rejects them.
    task.register_pipeline_channels([value for value in (cpu, memory) if not isinstance(value, str)])
    # Retry pods that were deleted or evicted; steps retry other failures. Finished shards, checkpoints
    # and the training job are reused.
    task.set_retry(
        num_retries=3, backoff_duration="30s", backoff_factor=2, backoff_max_duration=_MAX_RETRY_TIME
    )
    # Kubeflow's cache does not detect changed sources or deleted data; steps reuse finished work themselves.
    return task.set_caching_options(False)


@cache
def default_parameters(*, volume: bool) -> Mapping[str, Any]:
    """Return the default of each parameter by name; "" for required parameters."""
    all_parameters = make_pipeline(CompileOptions(volume=volume)).pipeline_func.__wrapped__
    parameters = inspect.signature(all_parameters).parameters
    return {name: "" if item.default is _REQUIRED else item.default for name, item in parameters.items()}


def without_parameters(pipeline: Callable[..., None], absent: Collection[str]) -> Callable[..., None]:
    """Return the pipeline without the parameters in `absent`, for which it uses the defaults."""
    signature = inspect.signature(pipeline)
    present = [item for name, item in signature.parameters.items() if name not in absent]

    @wraps(pipeline)
    def variant(*values: Any) -> None:
        pipeline(**{item.name: value for item, value in zip(present, values, strict=True)})

    variant.__signature__ = signature.replace(parameters=present)  # type: ignore[attr-defined]
    return variant
