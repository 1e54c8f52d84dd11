"""`kubedet model`: published models, their versions, and what servers need of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipelines.commands import Commands, options, trace
from trainer.base.errors import DataError, StorageError

if TYPE_CHECKING:
    from trainer.export.bundle import Bundle


def add(commands: Commands) -> None:
    """Declare the commands."""
    parser = commands.add_parser(
        "model",
        description="List and show exported models, compare one with its checksums and signature, make "
        "another version of a published one the current one, and lay one out for Triton and KServe.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    root = argparse.ArgumentParser(add_help=False)
    options.add_published(root)
    one_model = argparse.ArgumentParser(add_help=False)
    options.add_model(one_model)
    _add(actions, "list", _list, "models and their versions", root)
    _add(actions, "show", _show, "the model card", one_model)
    verify = _add(actions, "verify", _verify, "compare a model with its checksums and signature", one_model)
    verify.add_argument("--public-key", default="", metavar="FILE", help="PEM file of the signer's key")
    verify.add_argument(
        "--at-least",
        default="",
        metavar="VERSION",
        help="refuse a model that was exported before this version",
    )
    promote = _add(actions, "promote", _promote, "make a version the current one", root)
    promote.add_argument("name", metavar="NAME", help="of the model, as `kubedet model list` shows it")
    promote.add_argument("version", metavar="VERSION", help="one of its versions, in full")
    rollback = _add(actions, "rollback", _rollback, "go back to the version before the current one", root)
    rollback.add_argument("name", metavar="NAME", help="of the model, as `kubedet model list` shows it")
    for switch in (promote, rollback):
        switch.add_argument(
            "--other-classes",
            action="store_true",
            help="even if its classes are not those of the current version",
        )
    trace.add(actions)
    layout = _add(actions, "layout", _layout, "write a Triton repository and a KServe service", one_model)
    layout.add_argument("-o", "--output", required=True, metavar="URI", help="folder to write to")
    layout.add_argument(
        "--format",
        default="onnx",
        dest="kind",
        metavar="F",
        help="onnx, onnx-int8 or openvino (default: onnx)",
    )
    layout.add_argument(
        "--max-batch", type=int, default=8, metavar="N", help="largest batch (default: %(default)s)"
    )
    layout.add_argument(
        "--storage-uri", default="", metavar="URI",
        help="where KServe finds the Triton repository (default: where it was written, if that is a bucket)",
    )  # fmt: skip
    layout.add_argument(
        "--service-account", default="", metavar="NAME", help="service account with the bucket's keys"
    )


def _add(
    actions: Commands, name: str, command: Callable[[argparse.Namespace], int], description: str,
    *parents: argparse.ArgumentParser,
) -> argparse.ArgumentParser:  # fmt: skip
    parser = actions.add_parser(name, help=description, description=description, parents=list(parents))
    parser.set_defaults(command=command)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    from trainer.data import seen
    from trainer.export import published_models

    names = published_models.names(arguments.data_root)
    if not names:
        print(f"no models are published under {arguments.data_root}")
    for name in names:
        current = _current(arguments.data_root, name)
        print(name)
        whole, damaged = published_models.versions(arguments.data_root, name)
        for version, bundle in whole.items():
            mark = "*" if current and current["version"] == version else " "
            ap = bundle.metadata["metrics"]["values"].get("coco/AP")
            scored = "-" if ap is None else f"{ap:.3f}"
            formats = ", ".join(bundle.metadata["formats"])
            gone = seen.forgotten_in(arguments.data_root, bundle.metadata["trained_on"]["shards"])
            note = f"  was trained on {gone} that are to be forgotten" if gone else ""
            print(f"{mark} {version}  {bundle.metadata['created']}  AP {scored}  {formats}{note}")
        for version, problem in damaged.items():
            mark = "*" if current and current["version"] == version else " "
            print(f"{mark} {version}  damaged: {problem.splitlines()[-1].strip()}")
    return 0


def _current(data_root: str, name: str) -> dict[str, Any] | None:
    """Return what is current; a model whose record is damaged does not hide the others."""
    from trainer.export import published_models

    try:
        return published_models.current(data_root, name)
    except (StorageError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None


def _show(arguments: argparse.Namespace) -> int:
    from trainer.export import bundle

    model = _load(arguments)
    with model.files([bundle.CARD]) as folder:
        print((folder / bundle.CARD).read_text(), end="")
    print(f"\nIn `{model.uri}`")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from trainer.export import published_models
    from trainer.export.bundle_signing import check_signature

    model = _load(arguments)
    compared = [model]
    if arguments.at_least:
        compared.append(published_models.check_at_least(model, arguments.at_least, arguments.data_root))
    for each in compared:
        each.check_whole()
    print(f"{model.uri}: {len(model.checksums)} files are as they were written, and no others are there")
    print(f"{model.metadata['name']} {model.metadata['model_version']}, sha256 of SHA256SUMS {model.digest}")
    if arguments.public_key:
        for each in compared:
            check_signature(each, arguments.public_key)
        print(f"signed by the key of {arguments.public_key}")
    if arguments.at_least:
        print(f"not older than version {arguments.at_least}")
    return 0


def _promote(arguments: argparse.Namespace) -> int:
    from trainer.export import published_models

    current = published_models.promote(
        arguments.data_root, arguments.name, arguments.version, other_classes=arguments.other_classes
    )
    print(f"current version of {arguments.name}: {current['version']}")
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    from trainer.export import published_models

    current = published_models.rollback(
        arguments.data_root, arguments.name, other_classes=arguments.other_classes
    )
    print(f"current version of {arguments.name}: {current['version']}")
    return 0


def _layout(arguments: argparse.Namespace) -> int:
    import yaml

    from trainer import storage
    from trainer.export.server_layouts import kserve_service, write_triton

    model = _load(arguments)
    repository = storage.join(arguments.output, "triton")
    place = arguments.storage_uri or ("" if storage.is_local(repository) else repository)
    # Before anything is written: it may refuse the place.
    service = kserve_service(model.metadata, place, arguments.service_account) if place else {}
    written = write_triton(model, repository, kind=arguments.kind, max_batch=arguments.max_batch)
    print(f"Triton: {written}")
    if not place:
        print("KServe: not written; give --storage-uri, the bucket or volume that will hold triton/")
        return 0
    uri = storage.join(arguments.output, "kserve.yaml")
    storage.write_bytes(uri, yaml.safe_dump(service, sort_keys=False).encode())
    print(f"KServe: {uri}")
    return 0


def _load(arguments: argparse.Namespace) -> Bundle:
    from trainer.export import published_models

    return published_models.load(arguments.model, arguments.data_root)
