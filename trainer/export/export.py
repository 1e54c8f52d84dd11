"""Exports a checkpoint: writes the files, checks them in their runtimes, and publishes the bundle."""

import hashlib
import json
import logging
import os
from dataclasses import asdict, replace
from typing import Any

import safetensors.torch

from trainer import storage
from trainer.base import log
from trainer.base.errors import ExportError, StorageError
from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import Config
from trainer.data.shard_folder import read_index
from trainer.data.shard_index import ShardDataset
from trainer.evaluation.truth_and_predictions import class_difference
from trainer.export import bundle
from trainer.export.description import collect_versions, read_results, write_description
from trainer.export.formats import FORMATS, FormatWriter
from trainer.export.published_models import resolve_name
from trainer.export.verify import verify_exports
from trainer.storage import check_writable
from trainer.training import checkpoint

SIGNING_KEY = "KUBEDET_SIGNING_KEY"  # environment variable: path of the PEM file that signs bundles
_LOG = logging.getLogger("export")


def export(
    checkpoint_uri: str,
    shards_uri: str,
    output_uri: str,
    config: Config,
    *,
    evaluation_uri: str = "",
    signing_key: str = "",
) -> dict[str, Any]:
    """Write a bundle with the formats in config.export to `output_uri`.

    The export is checked on validation images of the shards (else on test or training images; on training
    tiles if there are any); int8 is calibrated on training images. `evaluation_uri` is the folder of the
    run's evaluation, or "". `signing_key` is the path of the PEM file that signs the bundle, by default the
    value of KUBEDET_SIGNING_KEY.

    Returns:
        model (the bundle's URI), name, model_version, files (name -> URI), bytes (name -> size),
        formats (name -> check), metrics and fingerprint.

    Raises:
        ExportError: for example, an exported model does not match the trained one; nothing is published.
    """
    names = list(dict.fromkeys(config.export.formats))
    key = signing_key or os.environ.get(SIGNING_KEY, "")
    if key:
        bundle.signing_config(key)  # Refuse an unusable key before minutes of work.
    check_writable(output_uri)
    sha256 = checkpoint.read_digest(checkpoint_uri)
    scores = read_results(evaluation_uri, sha256)
    inputs = [sha256, asdict(config.export), asdict(scores), collect_versions()]
    made_from = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    # With a key, export and sign again: the previous signature may be from another key.
    if not key and _is_exported(output_uri, made_from):
        _LOG.info("the model is already exported and checked: %s", output_uri)
        return _result(output_uri)
    detector, meta = checkpoint.load_model(checkpoint_uri)
    index = read_index(shards_uri)
    config = replace(config, export=replace(config.export, name=resolve_name(config.export.name, shards_uri)))
    # A model for tiles detects little in whole images, and only training images are cut into tiles.
    order = ("train",) if meta["config"]["data"].get("tile") else ("val", "test", "train")
    split = next((name for name in order if index.samples.get(name)), "")
    if not split:
        raise ExportError(
            f"the shards {shards_uri} have no images to check the export on",
            fix="create shards from a source with validation or test images",
        )
    classes = [category["name"] for category in meta["categories"]]
    if difference := class_difference(index.class_names, classes, "the data", "the model"):
        raise ExportError(
            f"the classes of the checkpoint {checkpoint_uri} differ from those of the shards {shards_uri}: "
            f"{difference}",
            fix="export with the shards that the model was trained on",
        )
    network_input = meta["network_input"]
    with temporary_folder() as folder, temporary_folder() as scratch:
        writer = FormatWriter(detector, network_input, config, shards_uri, scratch)
        for kind in names:
            file = FORMATS[kind].file
            _LOG.info("writing %s, input %dx%d", file, network_input.size, network_input.size)
            with log.log_activity(_LOG, f"writing {file}"):
                FORMATS[kind].write(writer, folder / file)
        weights = {key: tensor.contiguous() for key, tensor in detector.state_dict().items()}
        safetensors.torch.save_file(weights, folder / bundle.WEIGHTS)
        dataset = ShardDataset(shards_uri, split)
        checks = verify_exports(folder, names, detector, dataset, config, network_input)
        write_description(
            folder,
            detector,
            meta,
            name=config.export.name,
            checkpoint_uri=checkpoint_uri,
            index=index,
            checks=checks,
            rows=writer.graph.rows,
            scores=scores,
            made_from=made_from,
        )
        bundle.write_checksums(folder)
        if key:
            bundle.sign(folder, key)
            _LOG.info("signed")
        bundle.publish(folder, output_uri)
    return _result(output_uri)


def _result(output_uri: str) -> dict[str, Any]:
    exported = bundle.load(output_uri)
    names = [*exported.checksums, bundle.CHECKSUMS, bundle.SIGNATURE]
    files = {name: storage.join(output_uri, name) for name in sorted(names)}
    sizes = {name: state.size for name, uri in files.items() if (state := storage.state(uri))}
    return {
        "model": output_uri,
        "name": exported.metadata.name,
        "model_version": exported.metadata.model_version,
        "files": {name: files[name] for name in sizes},
        "bytes": sizes,
        "formats": {name: asdict(entry.check) for name, entry in exported.metadata.formats.items()},
        "metrics": exported.metadata.metrics.values,
        "fingerprint": exported.metadata.trained_on.shards,
    }


def _is_exported(output_uri: str, made_from: str) -> bool:
    if storage.exists(storage.join(output_uri, bundle.SIGNATURE)) or not bundle.exists(output_uri):
        return False
    try:
        earlier = bundle.load(output_uri)
        earlier.verify_checksums()
    except StorageError:
        return False  # damaged: export again
    return earlier.metadata.made_from == made_from
