"""`kubedet model`: published models, their versions, and what servers need of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.commands import Commands, options

if TYPE_CHECKING:
    from trainer.export.bundle import Bundle


def add(commands: Commands) -> None:
    """Declare the commands."""
    parser = commands.add_parser(
        "model",
        help="list, show, verify, promote and lay out exported models",
        description="List and show exported models, compare one with its checksums and signature, make "
        "another version of a published one the current one, and lay one out for Triton and KServe.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    root = argparse.ArgumentParser(add_help=False)
    options.add_published(root)
    one = argparse.ArgumentParser(add_help=False)
    options.add_model(one)
    _add(actions, "list", _list, "models and their versions", root)
    _add(actions, "show", _show, "the model card", one)
    verify = _add(actions, "verify", _verify, "compare a model with its checksums and signature", one)
    verify.add_argument("--public-key", default="", metavar="FILE", help="PEM file of the signer's key")
    promote = _add(actions, "promote", _promote, "make a version the current one", root)
    promote.add_argument("name", metavar="NAME", help="of the model, as `kubedet model list` shows it")
    promote.add_argument("version", metavar="VERSION", help="one of its versions, in full")
    rollback = _add(actions, "rollback", _rollback, "go back to the version before the current one", root)
    rollback.add_argument("name", metavar="NAME", help="of the model, as `kubedet model list` shows it")
    layout = _add(actions, "layout", _layout, "write a Triton repository and a KServe service", one)
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


def _list(asked: argparse.Namespace) -> int:
    from trainer.export import published_models

    names = published_models.names(asked.data_root)
    if not names:
        print(f"no models are published under {asked.data_root}")
    for name in names:
        now = published_models.current(asked.data_root, name)
        print(name)
        whole, damaged = published_models.versions(asked.data_root, name)
        for version, found in whole.items():
            mark = "*" if now and now["version"] == version else " "
            ap = found.metadata["metrics"]["values"].get("coco/AP")
            scored = "-" if ap is None else f"{ap:.3f}"
            formats = ", ".join(found.metadata["formats"])
            print(f"{mark} {version}  {found.metadata['created']}  AP {scored}  {formats}")
        for version, problem in damaged.items():
            mark = "*" if now and now["version"] == version else " "
            print(f"{mark} {version}  damaged: {problem.splitlines()[-1].strip()}")
    return 0


def _show(asked: argparse.Namespace) -> int:
    from trainer.export import bundle

    found = _load(asked)
    with found.files([bundle.CARD]) as folder:
        print((folder / bundle.CARD).read_text(), end="")
    print(f"\nIn `{found.uri}`")
    return 0


def _verify(asked: argparse.Namespace) -> int:
    from trainer.export.bundle_signing import check_signature

    found = _load(asked)
    found.check()
    print(f"{found.uri}: {len(found.checksums)} files are as they were written")
    if asked.public_key:
        check_signature(found, asked.public_key)
        print(f"signed by the key of {asked.public_key}")
    return 0


def _promote(asked: argparse.Namespace) -> int:
    from trainer.export import published_models

    now = published_models.promote(asked.data_root, asked.name, asked.version)
    print(f"current version of {asked.name}: {now['version']}")
    return 0


def _rollback(asked: argparse.Namespace) -> int:
    from trainer.export import published_models

    now = published_models.rollback(asked.data_root, asked.name)
    print(f"current version of {asked.name}: {now['version']}")
    return 0


def _layout(asked: argparse.Namespace) -> int:
    import yaml

    from trainer import storage
    from trainer.export.server_layouts import kserve_service, write_triton

    found = _load(asked)
    repository = storage.join(asked.output, "triton")
    place = asked.storage_uri or ("" if storage.is_local(repository) else repository)
    # Before anything is written: it may refuse the place.
    service = kserve_service(found.metadata, place, asked.service_account) if place else {}
    written = write_triton(found, repository, kind=asked.kind, max_batch=asked.max_batch)
    print(f"Triton: {written}")
    if not place:
        print("KServe: not written; give --storage-uri, the bucket or volume that will hold triton/")
        return 0
    uri = storage.join(asked.output, "kserve.yaml")
    storage.write_bytes(uri, yaml.safe_dump(service, sort_keys=False).encode())
    print(f"KServe: {uri}")
    return 0


def _load(asked: argparse.Namespace) -> Bundle:
    from trainer.export import bundle, published_models

    return bundle.load(published_models.resolve(asked.model, asked.data_root))
