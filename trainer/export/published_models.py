"""Manages published models: each folder `<data_root>/models/NAME/VERSION/` is a bundle.

The JSON file `current` in NAME names the current version, and contains its metrics.
"""

import logging
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

from pydantic.dataclasses import dataclass

from trainer import storage
from trainer.base.errors import ConfigError, DamagedError, DataError, FormatError, StorageError, check_name
from trainer.base.json_files import STRICT
from trainer.data.source_names import dataset_name
from trainer.export import bundle
from trainer.export.bundle import Bundle

_LOG = logging.getLogger("model")
RENAME_FIX = (
    "choose another model name with --set export.name=NAME; or, if the model's users expect other classes, "
    "--set export.other_classes=true"
)

CURRENT = "current"


@dataclass(config=STRICT, frozen=True)
class CurrentModel:
    """Content of `current`."""

    name: str
    version: str
    digest: str  # see `Bundle`
    model: str  # URI of the bundle
    checkpoint: str
    evaluation: str  # URI of the evaluation's folder, or ""
    fingerprint: str  # fingerprint of the shards
    metrics: dict[str, float]
    classes: list[str]  # names by label
    promoted: str = ""  # time of the promotion
    kind: Literal["current model"] = "current model"
    form: Literal[1] = 1


def _check_model_name(name: str) -> None:
    check_name(name, "model or version", CURRENT)


def model_folder(data_root: str, name: str) -> str:
    """Return the URI of the folder with a model's versions."""
    _check_model_name(name)
    return storage.join(data_root, "models", name)


def read_current(data_root: str, name: str, *, ignored: str = "") -> CurrentModel | None:
    """Return the content of a model's `current`; None if it has no versions other than `ignored`.

    Raises DamagedError if there are versions but no `current`: gates need a baseline.
    """
    uri = storage.join(model_folder(data_root, name), CURRENT)
    remedy = f"write it again: kubedet model promote {name} VERSION --data-root {data_root}"
    if not storage.exists(uri):
        if others := [version for version in version_names(data_root, name) if version != ignored]:
            raise DamagedError(f"{uri} is missing, but {name} has versions: {', '.join(others)}", fix=remedy)
        return None
    record = storage.read_model(uri, CurrentModel, remedy)
    _check_model_name(record.version)
    return record


def check_classes(
    data_root: str, name: str, classes: list[str], *, other_classes: bool, fix: str, ignored: str = ""
) -> None:
    """Refuse classes that differ from those of the current version: clients would misread the labels.

    For `ignored` see `read_current`.
    """
    from trainer.evaluation.truth_and_predictions import class_difference

    record = None if other_classes else read_current(data_root, name, ignored=ignored)
    if record and (difference := class_difference(record.classes, classes, "that version", "this one")):
        raise ConfigError(
            f"the classes are not those of {name} {record.version}, the current version of this model in "
            f"{data_root}: {difference}",
            fix=fix,
        )


def resolve_name(name: str, shards_uri: str) -> str:
    """Return the configured name of a model, or by default the name of the data."""
    from trainer.data.shard_folder import read_index

    name = name or dataset_name(read_index(shards_uri).source)
    _check_model_name(name)
    return name


def publish(source_uri: str, data_root: str, name: str, *, other_classes: bool = False) -> CurrentModel:
    """Copy a bundle to the folder of its version, unless that exists, and make it current."""
    source = bundle.load(source_uri)
    version = source.metadata.model_version
    _check_model_name(version)
    target = storage.join(model_folder(data_root, name), version)
    check_classes(
        data_root, name, source.class_names, other_classes=other_classes, fix=RENAME_FIX, ignored=version
    )
    if not bundle.exists(target):
        bundle.copy(source, target)
    return promote(data_root, name, version, other_classes=True)


def promote(data_root: str, name: str, version: str, *, other_classes: bool = False) -> CurrentModel:
    """Make a version current, after comparing all its files with their checksums."""
    chosen = bundle.load(_version_uri(data_root, name, version))
    storage.touch(storage.join(chosen.uri, bundle.CHECKSUMS))  # `data prune` keeps new files.
    _check_identity(chosen)
    fix = "add --other-classes if the model's users expect them"
    try:
        check_classes(
            data_root, name, chosen.class_names, other_classes=other_classes, fix=fix, ignored=version
        )
    except (DamagedError, FormatError) as error:  # the previous classes are unknown
        _LOG.warning("%s; it is replaced", error.message)
    chosen.verify_checksums()
    metadata = chosen.metadata
    record = CurrentModel(
        name=name,
        version=version,
        digest=chosen.digest,
        model=storage.absolute(chosen.uri),
        checkpoint=metadata.trained_on.checkpoint,
        evaluation=metadata.metrics.evaluation,
        fingerprint=metadata.trained_on.shards,
        metrics=metadata.metrics.values,
        classes=chosen.class_names,
        promoted=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    storage.remove_stale(model_folder(data_root, name))
    storage.write_json(storage.join(model_folder(data_root, name), CURRENT), asdict(record))
    return record


def model_names(data_root: str) -> list[str]:
    """Return the sorted names of the models that have versions."""
    files = storage.list_files(storage.join(data_root, "models"))
    return sorted({name.split("/")[0] for name in files if name.endswith(f"/{bundle.CHECKSUMS}")})


def version_names(data_root: str, name: str) -> list[str]:
    """Return the sorted names of a model's versions without checking their files."""
    files = [path.split("/") for path in storage.list_files(model_folder(data_root, name))]
    return sorted(parts[0] for parts in files if parts[1:] == [bundle.CHECKSUMS])


def load_versions(data_root: str, name: str) -> tuple[dict[str, Bundle], dict[str, str]]:
    """Return a model's bundles by version, the oldest first, and the errors of damaged versions."""
    bundles, damaged = {}, {}
    for version in version_names(data_root, name):
        try:
            loaded = bundle.load(storage.join(model_folder(data_root, name), version))
            _check_identity(loaded)
            bundles[version] = loaded
        except (StorageError, DataError) as error:
            damaged[version] = error.message
    return dict(sorted(bundles.items(), key=lambda item: item[1].metadata.created)), damaged


def load(model: str, data_root: str) -> Bundle:
    """Load a bundle by its folder's URI, NAME (the current version) or NAME@VERSION."""
    record, uri = None, model
    if not bundle.exists(model):
        name, _, version = model.partition("@")
        try:
            _check_model_name(name)
        except ConfigError:
            fix = "use the folder of an exported model (RUN/model), or NAME[@VERSION] with --data-root"
            raise StorageError(f"{model} is not a bundle", fix=fix) from None
        record = None if version else read_current(data_root, name)
        if not version and record is None:
            raise StorageError(
                f"{data_root} has no current version of a model {name}, and {model} is not a bundle",
                fix=f"{_available_models(data_root)}; or use the folder of an exported model (RUN/model)",
            )
        # Do not use the URI in `current`: the volume may be mounted at another path here.
        uri = _version_uri(data_root, name, record.version if record else version)
    chosen = bundle.load(uri)
    _check_identity(chosen)
    if record and record.digest != chosen.digest:
        raise StorageError(
            f"{uri} has changed since it became the current version of {model}: the sha256 of its "
            f"{bundle.CHECKSUMS} is {chosen.digest}, not {record.digest}",
            fix=f"check why it changed; `kubedet model promote {model} VERSION` accepts it",
        )
    return chosen


def check_not_older(chosen: Bundle, version: str, data_root: str) -> Bundle:
    """Refuse a bundle that is older than a version of the same model, and return that version.

    `current` is not signed, so it could name an older signed version. This compares the times `created` in
    the signed metadata; the caller must check the signature of the returned version.
    """
    named = load(f"{chosen.metadata.name}@{version}", data_root)
    times = [datetime.fromisoformat(item.metadata.created) for item in (chosen, named)]
    if times[0] < times[1]:
        raise StorageError(
            f"{chosen.uri} is older than version {version}: it was created {times[0]}, the other one "
            f"{times[1]}",
            fix="check how it became current; `kubedet model promote` makes another version current",
        )
    return named


def _check_identity(chosen: Bundle) -> None:
    # The metadata is signed, the folder's name is not: an old model could replace a newer one.
    *_, above, name, version = ["", "", *storage.absolute(chosen.uri).rsplit("/", 3)]
    stated = (chosen.metadata.name, chosen.metadata.model_version)
    if above == "models" and stated != (name, version):
        raise StorageError(
            f"{chosen.uri} contains {stated[0]} {stated[1]}, not {name} {version}",
            fix="do not use it: restore that version, or export the model again",
        )


def _version_uri(data_root: str, name: str, version: str) -> str:
    _check_model_name(version)
    uri = storage.join(model_folder(data_root, name), version)
    if bundle.exists(uri):
        return uri
    listed = ", ".join(version_names(data_root, name))
    raise StorageError(
        f"no version {version} of the model {name} in {data_root}",
        fix=f"versions: {listed}" if listed else _available_models(data_root),
    )


def _available_models(data_root: str) -> str:
    return f"available models: {', '.join(model_names(data_root)) or 'none'}"
