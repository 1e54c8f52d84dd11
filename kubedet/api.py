"""The interface of kubedet: one function for each command, with the same names of parameters.

Every error that a user can cause is a `KubedetError`, whose `fix` says what to do. Importing this module
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

    Download, shard, train, evaluate, and export. If it is stopped or killed, repeat the command with the same
    name to continue. Exit code 0 also if the gate fails.

    Args:
        source: images and boxes: sample (generated), coco:URI, coco:2017, voc:URI, yolo:URI, openimages:, or
            the URI or path of a COCO, VOC or YOLO folder
        recipe: a whole configuration: a name (`kubedet recipes list` shows them), or a file as `kubedet tune`
            writes it
        minutes: train for at most so many minutes; the same as --set train.minutes=MINUTES
        overrides: change one value of the configuration, e.g. train.lr=0.01; may be repeated
        gate: rules that a model must pass to be exported, e.g. 'coco/AP50 >= 0.5', separated by commas
            (default: the recipe's)
        min_new_images: skip training (and succeed) if fewer images were added, changed or removed since the
            current version of the model; 0: always train
        warm_start: champion starts from the weights of the current version of the model, and trains a quarter
            of the recipe's epochs unless train.epochs is set
        nproc: training processes (default: one for each GPU; 2 without GPUs)
        name: name of the run (default: the recipe and the time)
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
        output: where runs go

    Raises:
        Interrupted: it was stopped; call it again with the same name to continue.
        KubedetError: an argument cannot be used, or a step failed.

    Examples:
        >>> tiny = {"train.epochs": 1, "loader.image_size": 96, "model.backbone_width": 8}
        >>> run = kubedet.run(source="sample:images=12,size=96", overrides=tiny, name="tiny", nproc=1)
        run tiny: recipe debug, source sample:images=12,size=96
        ...
        >>> sorted(run.metrics)[:2], run.model.names
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
        trained=paths.get("model") or paths.get("checkpoint", ""),
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

    Compile the pipeline and start a run of it in Kubeflow Pipelines. With --wait the exit code is 1 if the
    run fails.

    Args:
        run: the parameters of the run
        name: name of the run (default: the recipe and the time)
        wait: follow the run to its end
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
    sent = ClusterRun(submission, Access.find(access.host, access.namespace, access.ca))
    if dry_run:
        return sent
    server = client.connect(access)
    run_id, link = client.start(submission, server)
    status = client.status_command(submission, server, run_id)
    sent = replace(sent, access=server.access, run_id=run_id, link=link, status_command=status)
    if wait:
        print(f"run {run_id}\n{link}", flush=True)
        client.follow(submission, server, run_id)
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
    """Search for the best hyper-parameters on this machine.

    Trials of a recipe train on the same shards, with values from Optuna's TPE; those that fall behind are
    stopped (ASHA), and the best is written as a recipe file. Repeat the command to continue a stopped search.
    `kubedet submit --trials N` searches in Kubeflow.

    Args:
        source: images and boxes, as for a run
        recipe: a whole configuration: a name, or a file
        overrides: change one value of the configuration, e.g. train.lr=0.01; may be repeated
        space: YAML file with the keys to search and their ranges, as `kubedet recipes space` prints it
            (default: the recipe's space)
        trials: number of trials, including those of earlier calls
        parallel: number of concurrent trials
        name: name of the search (default: tune-RECIPE)
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
        output: where runs go
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
    """Create a recurring run, or replace the one of the same name.

    One run at a time; missed runs are skipped.

    Args:
        run: the parameters of each run
        cron: minute, hour, day of the month, month, day of the week (0 is Sunday), optionally with the second
            first; '0 2 * * *' is every night at 2, in the cluster's time zone (usually UTC)
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
    """Show the runs of a schedule: times, state, verdict, AP.

    Args:
        name: name of the schedule
        data_root: location of the runs' data for this machine, if it differs
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.read_history(name, data_root, access)


@public
def schedule_run(*, name: Name = SCHEDULE, access: Access = Access()) -> tuple[str, str]:
    """Start a run of a schedule now; return its id and its address in the UI.

    Args:
        name: name of the schedule
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    return schedules.start_now(name, access)


@public
def schedule_delete(*, name: Name = SCHEDULE, access: Access = Access()) -> None:
    """Delete a schedule; the runs that it has started stay.

    Args:
        name: name of the schedule
        access: how to reach Kubeflow Pipelines
    """
    from pipelines import schedules

    schedules.delete(name, access)


@public
def load(model: ModelPath, *, data_root: Uri = DATA_ROOT, format: Name = "", tile: int = -1) -> "Model":
    """Load a model to predict with.

    Args:
        model: a bundle's folder (RUN/model), which runs in onnxruntime; a checkpoint (RUN/train/best.pt),
            which runs in PyTorch; or NAME or NAME@VERSION of a published model. The first two may be URIs.
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
        format: format of the bundle to run, as for `predict`.
        tile: side of the tiles, in pixels, that images are detected in; 0: the whole image; -1: as trained.

    Examples:
        >>> kubedet.load("runs/first/model").names
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

    For every image NAME the folder gets NAME.jpg with drawn detections and NAME.json, and detections.json
    has all.

    Args:
        model: folder or URI of an exported model, a checkpoint, or NAME or NAME@VERSION of a published model
        images: image files, folders of images, or patterns such as 'images/*.jpg'
        output: folder for the results
        score: minimum score of a detection, from 0 to 1
        tile: detect in tiles of this side, in pixels, and merge the detections of neighboring ones; 0: the
            whole image; -1: as in the model's training
        format: format of the model to run: onnx, onnx-int8, raw (default: the first available, else its
            weights in PyTorch)
        annotations: also write the detections as annotations to be corrected in another tool: coco.json, or
            label-studio.json and its labeling configuration
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
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

    A page shows the detections in an image dropped on it. It is for trying a model, not for production:
    Triton and KServe serve its ONNX file.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published one
        host: address to listen on
        port: port; 0 chooses a free one
        allow_host: another host name of this server, as a proxy or a Service gives it, or a pattern such as
            *.example.org; may be repeated. IP addresses, localhost and this machine's name need none
        format: format of the model to run: onnx, onnx-int8, raw (default: the first available, else its
            weights in PyTorch)
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
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
    report.html, metrics.json and the predictions. Exit code 1 if the rules of --gate fail.

    Args:
        model: URI of best.pt, of an exported model's folder, or of a file in it
        shards: folder that the shard step wrote
        output: folder for the evaluation (default: a new one in ./evaluations)
        split: split to score (default: test, or val if there is no test)
        tile: detect in tiles of this side, in pixels, and merge the detections of neighboring ones; 0: the
            whole image; -1: as in the model's training
        baseline: a run, an evaluation or a model to compare with; none: no comparison (default: the last
            model of that name that passed)
        gate: rules separated by commas, e.g. 'coco/AP >= 0.3, AP[person] >= 0.2, coco/AP >= baseline - 0.01'
        nproc: processes that share the images (default: one for each GPU; without GPUs one, which uses all
            cores)
        overrides: change one value of the configuration, e.g. train.lr=0.01; may be repeated

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
    return _evaluation(folder, summary, rules)


def _evaluation_folder(output: str) -> str:
    return output or f"evaluations/{datetime.now():%Y%m%d-%H%M%S}"


def _evaluation(folder: str, summary: Mapping[str, Any], rules: Sequence[str]) -> Evaluation:
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
    """List the named configurations; a run uses one (--recipe) and changes keys (--set)."""
    from trainer.model.recipes import RECIPES

    return {name: (recipe.__doc__ or "").splitlines()[0] for name, recipe in RECIPES.items()}


@public
def recipes_show(name: Name) -> "Config":
    """Print one recipe with all its keys, as JSON.

    Args:
        name: name of the recipe
    """
    from trainer.model import recipes

    return recipes.load(name)


@public
def recipes_explain(text: Text = "", *, recipe: Name = "") -> "list[Explanation]":
    """Explain the keys of configurations.

    Args:
        text: only keys that contain this text, e.g. train. or anchor
        recipe: show the values of this recipe, and only its keys, instead of the defaults
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
    """Print the keys that a search changes and their ranges, as a YAML file for `tune`.

    Args:
        name: name of the recipe
    """
    from operations.tuning.space import parse, text

    return text(parse("", name, {}, f"the space of {name}")) + "\n"


@public
def weights_fetch(
    names: Annotated[Sequence[str], "NAME"] = (), *, data_root: Uri = DATA_ROOT
) -> "dict[str, PublishedFile]":
    """Fetch published weights into DATA_ROOT/weights, e.g. for a cluster without internet.

    Their hashes are checked; damaged files are fetched again. For a cluster, fetch into a folder and copy
    its weights/ into the cluster's data root.

    Args:
        names: recipes, or weights: torchvision:NAME, hf:ORG/NAME, https://... (default: those of all recipes)
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
    """
    from trainer.weights import weights_mirror

    fetched = {}
    for uri in _needed_weights(names):
        weights_mirror.fetch_if_needed(uri, data_root)
        if file := weights_mirror.find_in_mirror(uri, data_root):
            fetched[uri] = file
    return fetched


def _needed_weights(names: Sequence[str]) -> list[str]:
    """Return the URIs of the weights that recipes start from, or of named ones."""
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
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
    """
    from trainer.base.errors import DataError, StorageError
    from trainer.export import published_models

    models = []
    for name in published_models.names(data_root):
        problem, current = "", ""
        try:
            record = published_models.current(data_root, name)
            current = record.version if record else ""
        except (StorageError, DataError) as error:  # The others are listed.
            problem = str(error)
        whole, damaged = published_models.versions(data_root, name)
        metadata = {version: bundle.metadata for version, bundle in whole.items()}
        models.append(PublishedModel(name, current, metadata, damaged, problem))
    return models


@public
def model_show(model: ModelPath, *, data_root: Uri = DATA_ROOT) -> "Bundle":
    """Show the model card.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published one
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
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
    """Compare a model with its checksums and signature.

    Args:
        model: folder or URI of an exported model, or NAME or NAME@VERSION of a published one
        public_key: PEM file of the signer's key
        at_least: reject a model that was exported before this version
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
    """
    from trainer.export import published_models
    from trainer.export.bundle import check_signature

    bundle = published_models.load(os.fspath(model), data_root)
    compared = [bundle]
    if at_least:
        compared.append(published_models.check_at_least(bundle, at_least, data_root))
    for item in compared:
        item.check_whole()
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
    """Make a version the current one; return it.

    Args:
        name: name of the model, as in `kubedet model list`
        version: one of its versions
        other_classes: allow classes that differ from those of the current version
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
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
    """Count images, boxes, classes and problems of shards or a source.

    The format of a path without a scheme is detected, and the source to use is printed.

    Args:
        uri: a folder DATA_ROOT/shards/FINGERPRINT, also on s3://, or a source: PATH, sample, coco:PATH,
            voc:PATH, ...
        overrides: change one value of the configuration, e.g. train.lr=0.01; may be repeated
        images: number of images per split to check for damage, size and near duplicates (default: 2000 on
            this machine, 100 in an object store, 0 on the web)
    """
    from trainer.data.inspection import inspect
    from trainer.model import recipes

    return inspect(uri, recipes.load(DATA_RECIPE, {**(overrides or {})}).data, images)


DATA_RECIPE = "small"  # Its settings say how a source is read, unless `overrides` does.


@public
def data_verify(uri: Uri, *, repair: bool = False) -> "VerificationResult":
    """Compare the hashes of shards or raw images with the recorded ones, and decode every image.

    Exit code 2 if anything is damaged or missing.

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
    """Draw random images of a split with their boxes on one PNG.

    With a recipe they are the first images of a training, as it sees them.

    Args:
        uri: a folder DATA_ROOT/shards/FINGERPRINT, also on s3://, or a source
        count: number of images
        split: train, val or test (default: the first)
        seed: seed of the random selection
        recipe: show the inputs of a training with this recipe (only for shards)
        overrides: change one value of the configuration, e.g. train.lr=0.01; may be repeated
        output: the PNG
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
        sheet, pictures, shown = preview.training_sheet(uri, config, count)
    elif unused := [key for key in overrides or {} if not key.startswith("data.")]:
        raise ConfigError(
            f"without a recipe, {', '.join(unused)} has no effect on the images",
            fix="add a recipe, e.g. --recipe small",
        )
    else:
        data = recipes.load(DATA_RECIPE, {**(overrides or {})}).data
        sheet, pictures, shown = preview.contact_sheet(uri, count, split, seed, data)
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
    """Merge a set with corrections of it, as a labelling tool exports them, into a new COCO set.

    Classes are matched by name. An image in both (with the same bytes) gets the boxes of the correction and
    stays in its split; new images are added to train.

    Args:
        source: the data set, as the source of a run
        corrections: more sets, e.g. corrections.zip; if several have an image, the last one wins
        output: folder of the new set; its last part names the models
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
    """Delete old runs, versions and data that nothing needs.

    Runs with their checkpoints, versions of models, shards, raw tables and images of a data root are deleted.
    The newest and the unfinished runs are kept, current, signed and registered versions, what these
    need, and young files.

    Args:
        keep: how many of the newest runs, and of previous versions, are kept
        older_than: delete only what is older; 1 or more, and longer than runs wait in your queue
        data_root: folder or URI of data and models, e.g. s3://bucket/prefix
        yes: delete; otherwise only show what would be deleted, and why the rest is kept
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
    """Write the compiled pipeline as one YAML file, for the UI or `kfp run create`.

    The variable KUBEDET_IMAGE names the image of its steps.

    Args:
        options: settings that Kubeflow needs before a run starts
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
    """Start a training job, or adopt the same one if it runs already.

    Args:
        job: the job
        wait: print its log and exit with its result; Ctrl-C deletes the job
        target: where to start it; the job's own namespace takes precedence
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
    """Print a job for other tools, and send nothing.

    Args:
        job: the job
        target: pytorchjob, trainjob, indexed-job, runai, runai-submit-dist or runai-submit-pytorch
        namespace: namespace of the job
    """
    from components.launchers.render import render

    return render(target, replace(job, namespace=namespace) if namespace else job)


@public
def job_fields(text: Text = "") -> "list[Explanation]":
    """Explain the fields of a job, with their defaults; * is the number of an item.

    Args:
        text: only fields that contain this text
    """
    from components.launchers.spec import JobSpec
    from trainer.config.explanations import explain

    return explain(JobSpec, text)


@public
def job_list(*, target: JobTarget = JobTarget()) -> "list[JobStatus] | str":
    """List the training jobs of a namespace; those of Run:ai as its own command line does.

    Args:
        target: where the jobs are
    """
    from pipelines import jobs

    return jobs.list_jobs(target)


@public
def job_status(name: Name, *, target: JobTarget = JobTarget()) -> "StatusExplanation":
    """Show the state of a job and its pods, and why they wait or failed.

    Args:
        name: name of the job
        target: where the job is
    """
    from pipelines import jobs

    return jobs.explain(jobs.connect(target), name)


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
        follow: follow the log until the job ends, also across failed pods
        rank: only the pod of this rank
        pod: only the pod of this name
        target: where the job is
    """
    from pipelines import jobs

    return jobs.read_log(target, name, follow=follow, rank=rank, pod=pod)


@public
def job_stop(name: Name, *, target: JobTarget = JobTarget()) -> None:
    """Delete a job and its pods; its checkpoints stay.

    Args:
        name: name of the job
        target: where the job is
    """
    from pipelines import jobs

    backend = jobs.connect(target)
    backend.stop(jobs.find(backend, name).name)


@public
def job_exec(
    name: Name,
    command: Annotated[Sequence[str], "[--] COMMAND"],
    *,
    rank: Count | None = None,
    pod: Name = "",
    target: JobTarget = JobTarget(),
) -> int:
    """Run a command in a pod of a job, on this terminal; the exit code is the command's.

    Args:
        name: name of the job
        command: the command; after -- it may have options
        rank: the pod of this rank (default: 0)
        pod: the pod of this name
        target: where the job is
    """
    from pipelines import jobs

    return jobs.execute(target, name, command, rank=rank, pod=pod)


@public
def cluster_manifests(*, output: Folder = "deploy") -> Path:
    """Write the manifests of a cluster, for kubectl.

    The folder deploy/ of this version has permissions, a volume, the runtime of TrainJobs, overlays for each
    kind of installation and example jobs. Its README.md explains which to apply.

    Args:
        output: folder to write
    """
    import shutil

    import pipelines
    from trainer.base.errors import StorageError
    from trainer.storage import outputs

    # `deploy/` in the wheel; in a checkout a link to it.
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

    Exit code 1 if something is missing.

    Args:
        local: check only this machine, for `kubedet run`
        data_root: write, read and delete a small file there, from this machine
        gpus: GPUs per machine
        credentials: Secret with the object store's keys
        claim: PersistentVolumeClaim of the data root
        nodes: number of machines of a job
        resource: devices per machine, e.g. rdma/hca=1; without a number, print the available devices; may be
            repeated
        access: the cluster of the runs; without a host, Kubeflow Pipelines is not checked
    """
    from trainer.launching.machine_checks import check_machine, writable

    if local and (credentials or claim or resource or access != Access()):
        raise ConfigError(
            "local checks nothing in a cluster",
            fix="leave out local, or credentials, claim, resource and the address of Kubeflow Pipelines",
        )
    resources = _read_resources(resource) | ({"nvidia.com/gpu": gpus} if gpus else {})
    if local:
        return check_machine(gpus, data_root)
    from pipelines.preflight import check_cluster

    place = Access.find(access.host, access.namespace, access.ca)
    checks = check_cluster(nodes=nodes, resources=resources, secret=credentials, claim=claim, access=place)
    return chain(checks, [writable(data_root)] if data_root else [])


def _read_resources(texts: Sequence[str]) -> dict[str, int]:
    """Read devices as NAME or NAME=N."""
    from trainer.base.safe_text import parse_digits

    resources = {}
    for text in texts:
        name, equals, number = text.partition("=")
        count = parse_digits(number) if equals else 0
        if not name or count is None:
            raise ConfigError(f"resource {text!r} is not NAME or NAME=N", fix="write e.g. rdma/hca=1")
        resources[name] = count
    return resources
