"""`kubedet model`: published models, their versions, their origin, and files for servers."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from pipelines.commands import Commands, option, options, show, verb
from trainer.base.errors import DataError, StorageError

if TYPE_CHECKING:
    from trainer.export.bundle import Bundle


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "model",
        description="List, show and verify exported models, choose the current version of a published one, "
        "trace their origin, and write files for Triton and KServe.",
    )
    verbs = parser.add_subparsers(required=True, metavar="ACTION")
    options.add_published(verb(verbs, "list", _list, "list models and their versions"))
    options.add_model(verb(verbs, "show", _show, "show the model card"))
    verify = verb(verbs, "verify", _verify, "compare a model with its checksums and signature")
    options.add_model(verify)
    option(verify, "--public-key FILE", "PEM file of the signer's key")
    option(verify, "--at-least VERSION", "reject a model that was exported before this version")
    promote = verb(verbs, "promote", _switch, "make a version the current one")
    rollback = verb(verbs, "rollback", _switch, "go back to the version before the current one")
    for switch in (promote, rollback):
        options.add_published(switch)
        switch.add_argument("name", metavar="NAME", help="name of the model, as in `kubedet model list`")
        option(switch, "--other-classes", "allow classes that differ from those of the current version")
    rollback.set_defaults(version="")
    promote.add_argument("version", metavar="VERSION", help="one of its versions")
    trace = verb(
        verbs,
        "trace",
        _trace,
        "show the origin of a model or run",
        "Show its run, checkpoint, configuration, code, images, shards, raw data and source.",
    )
    trace.add_argument(
        "what",
        metavar="MODEL|RUN",
        help="NAME, NAME@VERSION or the folder of a model; name, id or folder of a run",
    )
    options.add_published(trace)
    option(trace, "--json", "print the result as JSON")


def _list(options: argparse.Namespace) -> int:
    from trainer.export import published_models

    names = published_models.names(options.data_root)
    if not names:
        show(f"no models are published under {options.data_root}")
    for name in names:
        try:
            record = published_models.current(options.data_root, name)
            current = record.version if record else ""
        except (StorageError, DataError) as error:  # Show the others.
            print(f"error: {error}", file=sys.stderr)
            current = ""
        show(name)
        whole, damaged = published_models.versions(options.data_root, name)
        for version, bundle in whole.items():
            ap = bundle.metadata.metrics.values.get("coco/AP")
            scored = "-" if ap is None else f"{ap:.3f}"
            formats = ", ".join(bundle.metadata.formats)
            mark, created = "*" if version == current else " ", bundle.metadata.created
            show(f"{mark} {version}  {created}  AP {scored}  {formats}")
        for version, problem in damaged.items():
            mark = "*" if version == current else " "
            show(f"{mark} {version}  damaged: {problem.splitlines()[-1].strip()}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from trainer.export import bundle

    model = _load(options)
    with model.files([bundle.CARD]) as folder:
        show((folder / bundle.CARD).read_text().rstrip("\n"))
    show(f"\nIn `{model.uri}`")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from trainer.export import published_models
    from trainer.export.bundle import check_signature

    model = _load(options)
    compared = [model]
    if options.at_least:
        compared.append(published_models.check_at_least(model, options.at_least, options.data_root))
    for each in compared:
        each.check_whole()
    show(f"{model.uri}: {len(model.checksums)} files are as they were written, and no others are there")
    show(f"{model.metadata.name} {model.metadata.model_version}, sha256 of SHA256SUMS {model.digest}")
    if options.public_key:
        for each in compared:
            check_signature(each, options.public_key)
        show(f"signed by the key of {options.public_key}")
    if options.at_least:
        show(f"not older than version {options.at_least}")
    return 0


def _switch(options: argparse.Namespace) -> int:
    from trainer.export import published_models

    root, name, other = options.data_root, options.name, options.other_classes
    if options.version:
        current = published_models.promote(root, name, options.version, other_classes=other)
    else:
        current = published_models.rollback(root, name, other_classes=other)
    show(f"current version of {name}: {current.version}")
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    from operations import lineage

    found = lineage.trace(arguments.what, arguments.data_root)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            if key != "kind" and value not in ("", None, [], {}):
                shown = ", ".join(map(str, value)) if isinstance(value, list) else value
                text = json.dumps(shown) if isinstance(shown, dict | bool) else str(shown)
                show(f"{key.replace('_', ' '):<13} {text}")
    return 0


def _load(options: argparse.Namespace) -> "Bundle":
    from trainer.export import published_models

    return published_models.load(options.model, options.data_root)
