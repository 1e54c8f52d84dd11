"""Write the components as the community's repository takes them, and compile each as its checks do."""

import argparse
import importlib.util
import shutil
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from community import readme, source
from community.catalogue import ENTRIES, EXTRAS, GROUP, IMAGE, STABILITY
from pipelines.parameters import TABLE

ROOT = Path(__file__).parents[1]
_CONTAINERFILE = """\
# The image of kubedet's components. Its versions are those that kubedet was tested with.
FROM python:3.11-slim

LABEL org.opencontainers.image.title="kubedet"
LABEL org.opencontainers.image.description="Steps of kubedet, which trains object detectors"
LABEL org.opencontainers.image.licenses="Apache-2.0"

COPY constraints.txt /tmp/constraints.txt
RUN python -m pip install --no-cache-dir -c /tmp/constraints.txt "kubedet[{extras}]=={version}"

# A pod may run as any user, on a read-only root: what is written goes to /tmp.
ENV HOME=/tmp USER=kubedet PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /tmp
"""


class _Dumper(yaml.SafeDumper):
    """As the catalogue's linter wants YAML: lists stand further in than what they belong to."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(
    datetime,
    lambda dumper, moment: dumper.represent_scalar("tag:yaml.org,2002:timestamp", readme.timestamp(moment)),
)


def file_of(name: str) -> Path:
    """Return the file of a component."""
    folders = (ROOT / "components", ROOT / "operations" / "tuning")
    return next(path for folder in folders if (path := folder / f"{name}.py").exists())


def write(folder: Path, owners: dict[str, list[str]], links: dict[str, str]) -> list[Path]:
    """Write `components/` of the catalogue, as far as it is ours.

    Args:
        folder: an empty one, or the root of a clone of the catalogue.
        owners: approvers and reviewers, by their names at GitHub.
        links: addresses that each page shows.

    Returns:
        The components' folders.
    """
    for category in {entry.category for entry in ENTRIES.values()}:
        shutil.rmtree(folder / "components" / category / GROUP, ignore_errors=True)  # An earlier version's.
    verified = datetime.now(UTC).replace(microsecond=0)
    groups: dict[Path, dict[str, tuple[str, source.Component]]] = {}
    folders = []
    meanings = {name: item.description for name, item in TABLE.items()}
    for name, entry in ENTRIES.items():
        component = source.convert(file_of(name).read_text(), IMAGE, meanings)
        metadata: dict[str, Any] = {
            "name": f"{GROUP}_{name}",
            "stability": STABILITY,
            "dependencies": {
                "kubeflow": [{"name": part, "version": required} for part, required in entry.kubeflow]
            },
            "tags": [entry.category, *entry.tags],
            "lastVerified": verified,
        }
        metadata |= {"links": links} if links else {}
        group = folder / "components" / entry.category / GROUP
        place = group / name
        files = {
            "__init__.py": f'from .component import {name}\n\n__all__ = ["{name}"]\n',
            "component.py": component.text,
            "metadata.yaml": _yaml(metadata, head="---\n"),
            "OWNERS": _yaml(owners),
            "README.md": readme.page(component, metadata, owners),
        }
        _write(place, files)
        _compile(place / "component.py", name)
        groups.setdefault(group, {})[name] = (metadata["name"], component)
        folders.append(place)
    for group, components in groups.items():
        docstring = f'"""Components of kubedet: {", ".join(components)}."""\n'
        _write(
            group, {"__init__.py": docstring, "OWNERS": _yaml(owners), "README.md": readme.index(components)}
        )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    image = _CONTAINERFILE.format(extras=EXTRAS, version=version)
    train = folder / "components" / ENTRIES["train"].category / GROUP / "train"
    _write(train, {"Containerfile": image, "constraints.txt": (ROOT / "constraints.txt").read_text()})
    return folders


def _yaml(content: dict[str, Any], head: str = "") -> str:
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def _compile(path: Path, name: str) -> None:
    """Load a component alone and compile it: so `lastVerified` says what was done."""
    with tempfile.TemporaryDirectory() as temporary:
        # A copy of it: Python leaves bytecode beside what it loads.
        copy = shutil.copy(path, temporary)
        spec = importlib.util.spec_from_file_location(f"community_{name}", copy)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # kfp looks up a function's source by its module.
        spec.loader.exec_module(module)
        compiler.Compiler().compile(getattr(module, name), f"{temporary}/{name}.yaml")


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m community", description=__doc__)
    parser.add_argument(
        "--owner", action="append", required=True, metavar="NAME",
        help="who approves changes there, by the name at GitHub: a member of Kubeflow's community; again for "
        "more",
    )  # fmt: skip
    parser.add_argument(
        "--reviewer", action="append", default=[], metavar="NAME", help="who reviews them, too"
    )
    parser.add_argument(
        "--documentation", metavar="URL", help="address of the documentation, which pages link to"
    )
    parser.add_argument(
        "-o", "--output", default="build/community", metavar="DIR",
        help="folder to write, or a clone of the catalogue (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    owners = {"approvers": options.owner} | ({"reviewers": options.reviewer} if options.reviewer else {})
    links = {"documentation": options.documentation} if options.documentation else {}
    folders = write(Path(options.output), owners, links)
    print(f"wrote {len(folders)} components to {options.output}/components")


if __name__ == "__main__":
    main()
