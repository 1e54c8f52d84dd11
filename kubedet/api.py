"""The Python API of kubedet: one function per command, with the same parameter names.

Every error that a user can cause is a `KubedetError`; its `fix` says what to do. Importing this module
loads neither torch nor kfp.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Interval

from kubedet.interface import public
from kubedet.results import ClusterRun, Evaluation, Preview, PublishedModel, Run
from pipelines import Access, JobTarget
from pipelines.pipeline_run import CompileOptions, PipelineRun
from trainer.base.errors import ConfigError

if TYPE_CHECKING:
    from components.launchers.backend import JobStatus
    from components.launchers.spec import JobSpec
    from kubedet.model import Model
    from operations.retention import Pruning
    from pipelines.jobs import StatusExplanation, SubmittedJob
    from pipelines.schedules import History, Schedule
    from trainer.config.explanations import Explanation
    from trainer.config.schema import Config
    from trainer.data.inspection import Report
    from trainer.data.merging import MergeResult
    from trainer.data.verification import VerificationResult
    from trainer.export.bundle import Bundle
    from trainer.export.predict_files import PredictedFiles
    from trainer.launching.machine_checks import Check
    from trainer.weights.weights_mirror import PublishedFile

Text: TypeAlias = Annotated[str, "TEXT"]
Name: TypeAlias = Annotated[str, "NAME"]
Uri: TypeAlias = Annotated[str, "URI"]
File: TypeAlias = Annotated[str, "FILE"]
Folder: TypeAlias = Annotated[str, "DIR"]
ModelPath: TypeAlias = Annotated[str | os.PathLike[str], "MODEL"]
Overrides: TypeAlias = Annotated[Mapping[str, object] | None, "KEY=VALUE"]
Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]

__all__ = [
    "cluster_manifests", "compile", "data_inspect", "data_merge", "data_preview", "data_prune",
    "data_verify", "doctor", "evaluate", "job_exec", "job_fields", "job_list", "job_logs", "job_render",
    "job_status", "job_stop", "job_submit", "load", "model_list", "model_promote",
    "model_show", "model_verify", "predict", "recipes_explain", "recipes_list",
    "recipes_show", "recipes_space", "run", "schedule_create", "schedule_delete", "schedule_history",
    "schedule_list", "schedule_run", "serve", "submit", "tune", "weights_fetch",
]  # fmt: skip

DATA_ROOT = "./data_root"
SCHEDULE = "kubedet"  # Default name of a schedule.


@public
def run(
    *,
    source: Uri = "sample",
    recipe: Name = "debug",
    minutes: Annotated[float, Gt(0)] | None = None,
    overrides: Overrides = None,
    gate: Annotated[str, "RULES"] = "",
    min_new_images: Count = 0,
    warm_start: Annotated[str, "FROM"] = "",
    nproc: int | None = None,
    name: Name = "",
    data_root: Uri = DATA_ROOT,
    output: Folder = "./runs",
) -> Run:
    """Run the whole pipeline on this machine.

    Download, shard, train, evaluate and export. To continue a run that was stopped or killed, repeat the
    command with the run's name. The exit code is 0 even if the gate fails.

    Args:
        source: the data set: sample (generated), coco:URI, coco:2017, voc:URI, yolo:URI, openimages:, or the
            URI or path of a COCO, VOC or YOLO folder
        recipe: the configuration: a recipe's name (see `kubedet recipes list`), or a recipe file, such as
            `kubedet tune` writes
        minutes: train for at most this many minutes; the same as --set train.minutes=MINUTES
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated
        gate: rules that a model must pass to be exported, e.g. 'coco/AP50 >= 0.5', separated by commas
            (default: the recipe's)
        min_new_images: skip training (and succeed) if fewer images were added, changed or removed since the
            current version of the model; 0: always train
        warm_start: champion: start from the weights of the model's current version, and train for a quarter
            of the recipe's epochs unless train.epochs is set
        nproc: number of training processes (default: one per GPU, or 2 without GPUs)
        name: name of the run (default: the recipe and the time)
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
        output: folder for runs

    Raises:
        Interrupted: the run was stopped; call `run` again with the same name to continue.
        KubedetError: an argument is invalid, or a step failed.

    Examples:
        >>> tiny = {"train.epochs": 1, "loader.image_size": 96, "model.backbone_width": 8}
        >>> run = kubedet.run(source="sample:images=12,size=96", overrides=tiny, name="tiny", nproc=1)
        run tiny: recipe debug, source sample:images=12,size=96
        ...
        >>> sorted(run.metrics)[:2], run.model.class_names
        (['coco/AP', 'coco/AP50'], ['circle', 'square', 'triangle', 'star', 'ring'])
    """
    from pipelines import run as local
    from trainer import storage
    from trainer.config.schema import MINUTES

    options = local.Options.make(
        name,
        recipe,
        ({MINUTES: minutes} if minutes is not None else {}) | {**(overrides or {})},
        source=source,
        gate=gate,
        min_new_images=min_new_images,
        warm_start=warm_start,
        nproc=nproc,
        data_root=data_root,
        output=output,
    )
    record = local.run(options)
    paths = record.paths
    return Run(
        folder=str(options.folder),
        report=paths.get("report", ""),
        metrics=record.metrics,
        passed=bool(record.gate.get("passed")),
        shards=storage.read_json(paths["metrics"])["shards"] if "metrics" in paths else "",
        name=options.name,
        model_uri=paths.get("model") or paths.get("checkpoint", ""),
    )


@public
def submit(
    run: PipelineRun = PipelineRun(),
    *,
    name: Name = "",
    wait: bool = False,
    dry_run: bool = False,
    access: Access = Access(),
) -> ClusterRun:
    """Run the pipeline in Kubeflow.

    Compile the pipeline and start a run in Kubeflow Pipelines. With --wait, the exit code is 1 if the run
    fails.

    Args:
        run: the parameters of the run
        name: name of the run (default: the recipe and the time)
        wait: follow the run until it ends
        dry_run: print what would be sent, without sending it
        access: how to reach Kubeflow Pipelines

    Examples:
        >>> nightly = kubedet.PipelineRun(source="coco:s3://bucket/set", data_root="s3://bucket/kubedet")
        >>> run = kubedet.submit(nightly, dry_run=True)
        >>> run.parameters["source"], run.run_id
        ('coco:s3://bucket/set', '')
    """
    from pipelines import client
    from pipelines.submission import Submission

    submission = Submission.make(run, name)
    sent = ClusterRun(submission, Access.resolve(access.host, access.namespace, access.ca))
    if dry_run:
        return sent
    server = client.connect(access)
    run_id, link = client.start_run(submission, server)
    status = client.status_command(submission, server, run_id)
    sent = replace(sent, access=server.access, run_id=run_id, link=link, status_command=status)
    if wait:
        print(f"run {run_id}\n{link}", flush=True)
        client.follow_run(submission, server, run_id)
    return sent


@public
def tune(
    *,
    source: Uri = "sample",
    recipe: Name = "debug",
    overrides: Overrides = None,
    space: File = "",
    trials: Positive = 20,
    parallel: Positive = 1,
    name: Name = "",
    data_root: Uri = DATA_ROOT,
    output: Folder = "./runs",
) -> Path:
    """Search for the best hyperparameters on this machine.

    All trials train on the same shards. Optuna's TPE sampler chooses their values, ASHA stops those that fall
    behind, and the best trial is written as a recipe file. Repeat the command to continue a stopped search.
    To search in Kubeflow, use `kubedet submit --trials N`.

    Args:
        source: the data set, as for `run`
        recipe: the configuration: a recipe's name, or a recipe file
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated
        space: YAML file with the keys to search and their ranges, in the format of `kubedet recipes space`
            (default: the recipe's search space)
        trials: number of trials, including those of earlier calls
        parallel: number of concurrent trials
        name: name of the search (default: tune-RECIPE)
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
        output: folder for runs
    """
    from pipelines import tuning

    return tuning.tune(source, recipe, overrides or {}, data_root, output, space, trials, parallel, name)


@public
def schedule_create(
    run: PipelineRun = PipelineRun(),
    *,
    cron: Text,
    name: Name = SCHEDULE,
    dry_run: bool = False,
    access: Access = Access(),
) -> "Schedule":
    """Create a recurring run, or replace the one with the same name.

    Only one run is active at a time; missed runs are skipped.

    Args:
        run: the parameters of each run
        cron: minute, hour, day of the month, month, day of the week (0 is Sunday), optionally preceded by the
            second; '0 2 * * *' is every night at 2, in the cluster's time zone (usually UTC)
        name: name of the schedule
        dry_run: print what would be sent, without sending it
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.create(run, cron, name, access, dry_run=dry_run)


@public
def schedule_list(*, access: Access = Access()) -> "list[Schedule]":
    """List the schedules.

    Args:
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.list_schedules(access)


@public
def schedule_history(*, name: Name = SCHEDULE, data_root: Uri = "", access: Access = Access()) -> "History":
    """Show the runs of a schedule with their times, state, verdict and AP.

    Args:
        name: name of the schedule
        data_root: path or URI of the runs' data root on this machine, if it differs
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.read_history(name, data_root, access)


@public
def schedule_run(*, name: Name = SCHEDULE, access: Access = Access()) -> tuple[str, str]:
    """Start a run of a schedule now; return its id and its URL in the UI.

    Args:
        name: name of the schedule
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.start_now(name, access)


@public
def schedule_delete(*, name: Name = SCHEDULE, access: Access = Access()) -> None:
    """Delete a schedule, but not the runs that it has started.

    Args:
        name: name of the schedule
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    schedules.delete(name, access)


@public
def load(model: ModelPath, *, data_root: Uri = DATA_ROOT, format: Name = "", tile: int = -1) -> "Model":
    """Load a model for prediction.

    Args:
        model: a bundle's folder (RUN/model), which runs in onnxruntime; a checkpoint (RUN/train/best.pt),
            which runs in PyTorch; or NAME or NAME@VERSION of a published model. Folders and checkpoints may
            be URIs.
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
        format: format of the bundle to run, as for `predict`.
        tile: side of the tiles that images are split into, in pixels; 0: the whole image; -1: as in training.

    Examples:
        >>> kubedet.load("runs/first/model").class_names
        ['cat', 'dog']
        >>> kubedet.load("pets", data_root="data_root").uri
        'data_root/models/pets/v1/model.onnx'
    """
    from kubedet.model import Model
    from trainer.export.predict import open_model

    return Model(open_model(os.fspath(model), data_root, format, tile=tile))


@public
def predict(
    model: ModelPath,
    images: Annotated[Sequence[str], "IMAGES"],
    *,
    output: Folder,
    score: Annotated[float, Interval(ge=0, le=1)] = 0.3,
    tile: int = -1,
    format: Name = "",
    annotations: Literal["coco", "label-studio"] | None = None,
    data_root: Uri = DATA_ROOT,
) -> "PredictedFiles":
    """Draw the detections of a model on images.

    For each image NAME, write NAME.jpg (the image with its detections) and NAME.json to the output folder;
    detections.json contains the detections of all images.

    Args:
        model: folder or URI of an exported model, a checkpoint, or NAME or NAME@VERSION of a published model
        images: image files, folders of images, or patterns such as 'images/*.jpg'
        output: folder for the results
        score: minimum score of a detection, from 0 to 1
        tile: split images into tiles with this side, in pixels, and merge the detections of neighboring
            tiles; 0: the whole image; -1: as in the model's training
        format: format of the model to run: onnx, onnx-int8, raw (default: the first available, else its
            weights in PyTorch)
        annotations: also write annotations to correct in a labeling tool: coco.json, or label-studio.json
            and its labeling configuration
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.export.predict import open_model
    from trainer.export.predict_files import find_images, predict_files

    find_images(images)  # A wrong path is reported before the model is loaded.
    opened = open_model(os.fspath(model), data_root, format, tile=tile)
    return predict_files(opened, images, output, score=score, annotations=annotations)


@public
def serve(
    model: ModelPath,
    *,
    host: Annotated[str, "HOST"] = "127.0.0.1",
    port: Count = 8080,
    allow_host: Annotated[Sequence[str], "NAME"] = (),
    format: Name = "",
    data_root: Uri = DATA_ROOT,
) -> None:
    """Try a model in a browser.

    The page shows the detections in an image that you drop on it. It is not meant for production: use Triton
    or KServe to serve the model's ONNX file there.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published model
        host: address to listen on
        port: port to listen on; 0: any free port
        allow_host: another host name that requests may use, e.g. that of a proxy or a Service, or a pattern
            such as *.example.org; may be repeated. IP addresses, localhost and this machine's name are always
            allowed
        format: format of the model to run: onnx, onnx-int8, raw (default: the first available, else its
            weights in PyTorch)
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.export import published_models
    from trainer.export.predict import open_bundle
    from trainer.export.server import serve

    opened = open_bundle(published_models.load(os.fspath(model), data_root), format)
    serve(opened, host, port, allow_host)


@public
def evaluate(
    model: ModelPath,
    *,
    shards: Uri,
    output: Uri = "",
    split: Literal["train", "val", "test"] | None = None,
    tile: int = -1,
    baseline: Uri = "",
    gate: Annotated[str, "RULES"] = "",
    nproc: Positive | None = None,
    overrides: Overrides = None,
) -> Evaluation:
    """Score a model on shards.

    Score a checkpoint or an exported model, compare it with a baseline, check the gate, and write
    report.html, metrics.json and the predictions. The exit code is 1 if a rule of --gate fails.

    Args:
        model: URI of best.pt, of an exported model's folder, or of a file in that folder
        shards: folder of shards, as written by the shard step
        output: folder for the evaluation (default: a new folder in ./evaluations)
        split: split to score (default: test, or val if there is no test)
        tile: split images into tiles with this side, in pixels, and merge the detections of neighboring
            tiles; 0: the whole image; -1: as in the model's training
        baseline: a run, an evaluation or a model to compare with; none: no comparison (default: the last
            model with the same name that passed)
        gate: rules separated by commas, e.g. 'coco/AP >= 0.3, AP[person] >= 0.2, coco/AP >= baseline - 0.01'
        nproc: number of processes that share the images (default: one per GPU; without GPUs, one process
            that uses all cores)
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated

    Examples:
        >>> shards, rule = "data_root/shards/0123abcd", "coco/AP >= 0.99"
        >>> evaluation = kubedet.evaluate("runs/first/train/best.pt", shards=shards, output="a", gate=rule)
        >>> evaluation.passed, evaluation.report, sorted(evaluation.metrics)[:2]
        (False, 'a/report.html', ['coco/AP', 'coco/AP50'])
    """
    from pipelines.evaluation import evaluate_model
    from trainer.evaluation.gate import split_rules

    folder, rules = _evaluation_folder(output), split_rules(gate)
    given = {"split": split, "baseline": baseline, "gate": rules}
    values: dict[str, object] = {f"evaluation.{key}": value for key, value in given.items() if value}
    if tile != -1:
        values["evaluation.tile"] = tile
    summary = evaluate_model(os.fspath(model), shards, folder, values | {**(overrides or {})}, rules, nproc)
    return _make_evaluation(folder, summary, rules)


def _evaluation_folder(output: str) -> str:
    return output or f"evaluations/{datetime.now():%Y%m%d-%H%M%S}"


def _make_evaluation(folder: str, summary: Mapping[str, Any], rules: Sequence[str]) -> Evaluation:
    from trainer import storage

    verdict, compared = summary["verdict"], summary["comparison"] or {}
    return Evaluation(
        folder=folder,
        report=storage.join(folder, "report.html"),
        metrics=summary["metrics"],
        passed=verdict["passed"],
        shards=summary.get("shards", ""),
        reason=verdict["reason"],
        rules=tuple(rules),
        comparison=compared,
    )


@public
def recipes_list() -> dict[str, str]:
    """List the recipes. A run uses one of them (--recipe) and may override its keys (--set)."""
    from trainer.model.recipes import RECIPES

    return {name: (recipe.__doc__ or "").splitlines()[0] for name, recipe in RECIPES.items()}


@public
def recipes_show(name: Name) -> "Config":
    """Print a recipe with all its keys, as JSON.

    Args:
        name: name of the recipe
    """
    from trainer.model import recipes

    return recipes.load(name)


@public
def recipes_explain(text: Text = "", *, recipe: Name = "") -> "list[Explanation]":
    """Explain the configuration keys.

    Args:
        text: only keys that contain this text, e.g. train. or anchor
        recipe: show the keys and values of this recipe instead of the defaults
    """
    from trainer.config import architectures
    from trainer.config.explanations import Variants, explain
    from trainer.config.schema import Config, ModelConfig
    from trainer.model import recipes

    values = asdict(recipes.load(recipe)) if recipe else None
    names = [values["model"]["architecture"]] if values else list(architectures.ARCHITECTURES)
    variants: Variants = {ModelConfig: {name: architectures.options_class(name) for name in names}}
    return explain(Config, text, values, variants)


@public
def recipes_space(name: Name) -> str:
    """Print a recipe's search space (keys and their ranges) as a YAML file for `tune`.

    Args:
        name: name of the recipe
    """
    from operations.tuning.space import format_space, parse_space

    return format_space(parse_space("", name, {}, f"the space of {name}")) + "\n"


@public
def weights_fetch(
    names: Annotated[Sequence[str], "NAME"] = (), *, data_root: Uri = DATA_ROOT
) -> "dict[str, PublishedFile]":
    """Fetch published weights into DATA_ROOT/weights, e.g. for a cluster without internet.

    Checksums are verified, and damaged files are fetched again. For a cluster, fetch the weights into a local
    folder and copy its weights/ into the cluster's data root.

    Args:
        names: recipes, or weights: torchvision:NAME, hf:ORG/NAME, https://... (default: the weights of all
            recipes)
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.weights import weights_mirror

    fetched = {}
    for uri in _needed_weights(names):
        weights_mirror.fetch_if_needed(uri, data_root)
        if file := weights_mirror.find_in_mirror(uri, data_root):
            fetched[uri] = file
    return fetched


def _needed_weights(names: Sequence[str]) -> list[str]:
    """Return the URIs of the named weights and of the weights that named recipes start from."""
    from trainer.model.recipes import RECIPES, load
    from trainer.weights.weights_mirror import is_published

    for name in names:
        if name not in RECIPES and not is_published(name):
            raise ConfigError(
                f"{name!r} is neither a recipe nor the name of published weights",
                fix=f"use one of {', '.join(RECIPES)}, torchvision:NAME, hf:ORG/NAME or https://...",
            )
    uris = [load(name).model.weights if name in RECIPES else name for name in names or RECIPES]
    return [*dict.fromkeys(uri for uri in uris if uri)]


@public
def model_list(*, data_root: Uri = DATA_ROOT) -> list[PublishedModel]:
    """List the published models and their versions.

    Args:
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.base.errors import DataError, StorageError
    from trainer.export import published_models

    models = []
    for name in published_models.model_names(data_root):
        problem, current = "", ""
        try:
            record = published_models.read_current(data_root, name)
            current = record.version if record else ""
        except (StorageError, DataError) as error:  # List the other models.
            problem = str(error)
        whole, damaged = published_models.load_versions(data_root, name)
        metadata = {version: bundle.metadata for version, bundle in whole.items()}
        models.append(PublishedModel(name, current, metadata, damaged, problem))
    return models


@public
def model_show(model: ModelPath, *, data_root: Uri = DATA_ROOT) -> "Bundle":
    """Show a model's card.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published model
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.export import published_models

    return published_models.load(os.fspath(model), data_root)


@public
def model_verify(
    model: ModelPath,
    *,
    public_key: File = "",
    at_least: Annotated[str, "VERSION"] = "",
    data_root: Uri = DATA_ROOT,
) -> "Bundle":
    """Verify the checksums and the signature of a model.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published model
        public_key: PEM file of the signer's key
        at_least: reject a model that was exported before this version
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.export import published_models
    from trainer.export.bundle import check_signature

    bundle = published_models.load(os.fspath(model), data_root)
    compared = [bundle]
    if at_least:
        compared.append(published_models.check_not_older(bundle, at_least, data_root))
    for item in compared:
        item.verify_exact_files()
        if public_key:
            check_signature(item, public_key)
    return bundle


@public
def model_promote(
    name: Name,
    version: Annotated[str, "VERSION"],
    *,
    other_classes: bool = False,
    data_root: Uri = DATA_ROOT,
) -> str:
    """Make a version of a model the current version; return the version.

    Args:
        name: name of the model, as in `kubedet model list`
        version: version to promote
        other_classes: allow the classes to differ from those of the current version
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
    """
    from trainer.export import published_models

    return published_models.promote(data_root, name, version, other_classes=other_classes).version


@public
def data_inspect(
    uri: Uri,
    *,
    overrides: Overrides = None,
    images: Count | None = None,
) -> "Report":
    """Count the images, boxes, classes and problems of shards or of a source.

    If the path has no scheme, its format is detected, and the matching source is printed.

    Args:
        uri: a folder DATA_ROOT/shards/FINGERPRINT, also on s3://, or a source: PATH, sample, coco:PATH,
            voc:PATH, ...
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated
        images: number of images per split to check for damage, size and near duplicates (default: 2000 for
            local files, 100 in an object store, 0 on the web)
    """
    from trainer.data.inspection import inspect
    from trainer.model import recipes

    return inspect(uri, recipes.load(DATA_RECIPE, {**(overrides or {})}).data, images)


DATA_RECIPE = "small"  # The recipe whose data settings are used to read sources.


@public
def data_verify(uri: Uri, *, repair: bool = False) -> "VerificationResult":
    """Verify the checksums of shards or raw images, and decode every image.

    The exit code is 2 if anything is damaged or missing.

    Args:
        uri: a folder DATA_ROOT/shards/FINGERPRINT or DATA_ROOT/raw/FINGERPRINT, also on s3://
        repair: rebuild missing or damaged files: shards from raw images, raw images from their source
    """
    from trainer.data import verification

    return (verification.repair if repair else verification.verify)(uri)


@public
def data_preview(
    uri: Uri,
    *,
    count: Positive = 16,
    split: Name = "",
    seed: int = 0,
    recipe: Name = "",
    overrides: Overrides = None,
    output: File = "preview.png",
) -> Preview:
    """Draw random images of a split, with their boxes, in a PNG file.

    With a recipe, draw the first inputs of a training run, after augmentation.

    Args:
        uri: a folder DATA_ROOT/shards/FINGERPRINT, also on s3://, or a source
        count: number of images
        split: train, val or test (default: the first)
        seed: seed of the random selection
        recipe: show the inputs of a training run with this recipe (only for shards)
        overrides: override a configuration value, e.g. train.lr=0.01; may be repeated
        output: PNG file to write
    """
    from trainer import storage
    from trainer.data import preview
    from trainer.model import recipes
    from trainer.storage import outputs

    if Path(output).suffix.lower() != ".png":
        raise ConfigError(f"output {output} must be a PNG file", fix="use the output preview.png")
    if recipe:
        if split not in ("", "train"):
            raise ConfigError(f"a recipe shows only training samples, not the split {split}", fix="omit it")
        config = recipes.load(recipe, {**(overrides or {})} | ({"train.seed": seed} if seed else {}))
        sheet, pictures, shown = preview.draw_training_sheet(uri, config, count)
    elif unused := [key for key in overrides or {} if not key.startswith("data.")]:
        raise ConfigError(
            f"without a recipe, {', '.join(unused)} has no effect on the images",
            fix="add a recipe, e.g. --recipe small",
        )
    else:
        data = recipes.load(DATA_RECIPE, {**(overrides or {})}).data
        sheet, pictures, shown = preview.draw_contact_sheet(uri, count, split, seed, data)
    outputs.claim_file(output)
    with storage.new_file(output, sync=False) as path:
        sheet.save(path, "PNG")
    bad = [f"{picture.file_name}: {picture.fault}" for picture in pictures if picture.fault]
    boxes = sum(len(picture.boxes) for picture in pictures)
    return Preview(output, shown, len(pictures) - len(bad), boxes, bad)


@public
def data_merge(
    source: Annotated[str, "SET"],
    corrections: Annotated[Sequence[str], "CORRECTIONS"],
    *,
    output: Folder,
) -> "MergeResult":
    """Merge a data set with corrections that a labeling tool exported, into a new COCO data set.

    Classes are matched by name. An image that is in both (with the same bytes) gets the boxes of the
    correction and stays in its split; new images are added to train.

    Args:
        source: the data set, as for `run`
        corrections: corrected data sets, e.g. corrections.zip; if several contain an image, the last one wins
        output: folder for the new data set; models trained on it are named after the folder
    """
    from trainer.data.merging import merge

    return merge(source, list(corrections), output)


@public
def data_prune(
    *,
    keep: Positive,
    older_than: Annotated[float, Ge(1), "DAYS"] = 7.0,
    data_root: Uri = DATA_ROOT,
    yes: bool = False,
) -> "Pruning":
    """Delete old runs, model versions and data that are no longer needed.

    Delete runs with their checkpoints, model versions, shards, raw tables and raw images from a data root.
    Keep the newest and unfinished runs, the current, signed and registered versions, everything that these
    need, and recent files.

    Args:
        keep: number of newest runs, and of previous versions, to keep
        older_than: delete only what is older than this; at least 1, and longer than runs wait in your queue
        data_root: folder or URI for data and models, e.g. s3://bucket/prefix
        yes: delete; without it, only show what would be deleted and why the rest is kept
    """
    from operations import retention
    from trainer import storage

    return (retention.prune if yes else retention.Pruning)(storage.absolute(data_root), keep, older_than)


@public
def compile(
    options: CompileOptions = CompileOptions(),
    *,
    output: Annotated[str | os.PathLike[str], "FILE"] = "pipeline.yaml",
) -> Path:
    """Write the compiled pipeline to a YAML file, for the UI or `kfp run create`.

    The environment variable KUBEDET_IMAGE sets the image of its steps.

    Args:
        options: settings that are fixed when the pipeline is compiled
        output: file to write

    Examples:
        >>> options = kubedet.CompileOptions(volume=True)
        >>> kubedet.compile(options, output="pipeline.yaml").stat().st_size > 10_000
        True
    """
    from pipelines.compiler import compile_pipeline
    from trainer.storage import outputs

    outputs.claim_file(os.fspath(output))
    compile_pipeline(path := Path(output), options)
    return path


@public
def job_submit(job: "JobSpec", *, wait: bool = False, target: JobTarget = JobTarget()) -> "SubmittedJob":
    """Start a training job, or attach to the same job if it is already running.

    Args:
        job: the job
        wait: print the job's log and exit with its result; Ctrl-C deletes the job
        target: where to start the job; the job's own namespace takes precedence
    """
    from pipelines import jobs

    return jobs.submit(target, job, wait=wait)


@public
def job_render(
    job: "JobSpec",
    *,
    target: Annotated[str, "TARGET"] = "pytorchjob",
    namespace: Name = "",
) -> str:
    """Print a job in the format of another tool, without starting it.

    Args:
        job: the job
        target: pytorchjob, trainjob, indexed-job, runai, runai-submit-dist or runai-submit-pytorch
        namespace: namespace of the job
    """
    from components.launchers.render import render

    return render(target, replace(job, namespace=namespace) if namespace else job)


@public
def job_fields(text: Text = "") -> "list[Explanation]":
    """Explain the fields of a job, with their defaults; * stands for the number of a list item.

    Args:
        text: only fields that contain this text
    """
    from components.launchers.spec import JobSpec
    from trainer.config.explanations import explain

    return explain(JobSpec, text)


@public
def job_list(*, target: JobTarget = JobTarget()) -> "list[JobStatus] | str":
    """List the training jobs of a namespace; for Run:ai, print the output of its command line.

    Args:
        target: where the jobs are
    """
    from pipelines import jobs

    return jobs.list_jobs(target)


@public
def job_status(name: Name, *, target: JobTarget = JobTarget()) -> "StatusExplanation":
    """Show the state of a job and its pods, and why they are waiting or failed.

    Args:
        name: name of the job
        target: where the job is
    """
    from pipelines import jobs

    return jobs.explain_status(jobs.connect(target), name)


@public
def job_logs(
    name: Name,
    *,
    follow: bool = False,
    rank: Count | None = None,
    pod: Name = "",
    target: JobTarget = JobTarget(),
) -> Iterator[str]:
    """Print the log of a job.

    Args:
        name: name of the job
        follow: follow the log until the job ends, even if pods fail and are replaced
        rank: only the pod with this rank
        pod: only the pod with this name
        target: where the job is
    """
    from pipelines import jobs

    return jobs.read_log(target, name, follow=follow, rank=rank, pod=pod)


@public
def job_stop(name: Name, *, target: JobTarget = JobTarget()) -> None:
    """Delete a job and its pods, but not its checkpoints.

    Args:
        name: name of the job
        target: where the job is
    """
    from pipelines import jobs

    backend = jobs.connect(target)
    backend.stop(jobs.find_job(backend, name).name)


@public
def job_exec(
    name: Name,
    command: Annotated[Sequence[str], "[--] COMMAND"],
    *,
    rank: Count | None = None,
    pod: Name = "",
    target: JobTarget = JobTarget(),
) -> int:
    """Run a command in a pod of a job, in this terminal; exit with the command's exit code.

    Args:
        name: name of the job
        command: the command to run; put -- before it if it has options
        rank: run it in the pod with this rank (default: 0)
        pod: run it in the pod with this name
        target: where the job is
    """
    from pipelines import jobs

    return jobs.execute(target, name, command, rank=rank, pod=pod)


@public
def cluster_manifests(*, output: Folder = "deploy") -> Path:
    """Write the Kubernetes manifests that a cluster needs, for kubectl.

    They contain permissions, a volume, the runtime of TrainJobs, an overlay per kind of installation, and
    example jobs. README.md, in the same folder, explains which to apply.

    Args:
        output: folder to write
    """
    import shutil

    import pipelines
    from trainer.base.errors import StorageError
    from trainer.storage import outputs

    # In a checkout, `pipelines/deploy` is a link to `deploy/`.
    manifests = Path(pipelines.__file__).parent / "deploy"
    try:
        outputs.require_new(output)
        shutil.copytree(manifests, output, dirs_exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot write {output}: {error.strerror or error}", fix="choose another folder"
        ) from error
    return Path(output)


@public
def doctor(
    *,
    local: bool = False,
    data_root: Uri = "",
    gpus: Count = 0,
    credentials: Annotated[str, "SECRET"] = "",
    claim: Annotated[str, "PVC"] = "",
    nodes: Positive = 1,
    resource: Annotated[Sequence[str], "NAME[=N]"] = (),
    access: Access = Access(),
) -> "Iterator[Check]":
    """Check the requirements of a run in the cluster of KUBECONFIG, or on this machine.

    The exit code is 1 if something is missing.

    Args:
        local: check only this machine, for `kubedet run`
        data_root: write, read and delete a small file in this data root, from this machine
        gpus: GPUs per machine
        credentials: Secret with the object store's keys
        claim: PersistentVolumeClaim of the data root
        nodes: number of machines per job
        resource: devices per machine, e.g. rdma/hca=1; without a number, print how many are available; may be
            repeated
        access: how to reach Kubeflow Pipelines, which is checked only if a host is given
    """
    from trainer.launching.machine_checks import check_local_machine, check_output

    if local and (credentials or claim or resource or access != Access()):
        raise ConfigError(
            "local checks nothing in a cluster",
            fix="leave out local, or credentials, claim, resource and the address of Kubeflow Pipelines",
        )
    resources = _read_resources(resource) | ({"nvidia.com/gpu": gpus} if gpus else {})
    if local:
        return check_local_machine(gpus, data_root)
    from pipelines.preflight import check_cluster

    place = Access.resolve(access.host, access.namespace, access.ca)
    checks = check_cluster(nodes=nodes, resources=resources, secret=credentials, claim=claim, access=place)
    return chain(checks, [check_output(data_root)] if data_root else [])


def _read_resources(texts: Sequence[str]) -> dict[str, int]:
    """Parse devices that are written as NAME or NAME=N."""
    from trainer.base.safe_text import parse_digits

    resources = {}
    for text in texts:
        name, equals, number = text.partition("=")
        count = parse_digits(number) if equals else 0
        if not name or count is None:
            raise ConfigError(f"resource {text!r} is not NAME or NAME=N", fix="write e.g. rdma/hca=1")
        resources[name] = count
    return resources
