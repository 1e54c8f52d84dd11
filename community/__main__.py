"""Write the components in the form of the community's repository."""

import argparse
import ast
import shutil
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pipelines.kubeflow import OLDEST
from pipelines.parameters import STEP_ARGUMENTS

ROOT = Path(__file__).parents[1]

GROUP = "kubedet"  # The folder of our components below each category.

IMAGE = f"ghcr.io/kubeflow/pipelines-components-{GROUP}:main"
"""The image that the community builds from our Containerfile; its checks allow no other registry."""

EXTRAS = "pod,export,signing,registry,mlflow,wandb,detr,lineage,tune"
"""Extras of the steps, as in `images/component.Dockerfile`."""

_PIPELINES = ("Pipelines", f">={OLDEST[0]}.{OLDEST[1]}.0")
_TRAINER = ("Trainer", ">=2.3.0")


@dataclass(frozen=True)
class Entry:
    """One component."""

    category: str  # Folder of the catalog.
    tags: tuple[str, ...]
    kubeflow: tuple[tuple[str, str], ...] = (_PIPELINES,)  # Required parts of Kubeflow with their versions.


_DATA = "data_processing"

ENTRIES = {
    "prepare": Entry(_DATA, ("object_detection", "dataset_preparation", "coco", "open_images")),
    "assist": Entry(_DATA, ("object_detection", "dataset_preparation", "parallel", "webdataset")),
    "train": Entry("training", ("object_detection", "pytorch", "distributed"), (_PIPELINES, _TRAINER)),
    "cleanup": Entry("training", ("object_detection", "exit_handler"), (_PIPELINES, _TRAINER)),
    "trial": Entry("training", ("object_detection", "pytorch", "hyper_parameters", "optuna")),
    "best": Entry("training", ("object_detection", "hyper_parameters", "optuna", "report")),
    "evaluate": Entry("evaluation", ("object_detection", "coco_metrics", "report", "gate")),
    "export": Entry("deployment", ("object_detection", "onnx", "model_registry", "signing")),
}
"""Each component of the pipeline by its name."""

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

_STABILITY = "alpha"  # The catalog's word for a component that others have not used yet.

_RESULT = "A word or line about the outcome, see above."
_WIDTH = 120  # Characters of a line that the catalog's linter allows.

_COMPILED = """


if __name__ == "__main__":
    from kfp.compiler import Compiler

    Compiler().compile({name}, package_path=__file__.replace(".py", "_component.yaml"))
"""


class _Dumper(yaml.SafeDumper):
    """Indents lists, as the catalog's linter requires."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(
    datetime,
    lambda dumper, moment: dumper.represent_scalar(
        "tag:yaml.org,2002:timestamp", f"{moment:%Y-%m-%dT%H:%M:%SZ}"
    ),
)


def file_of(name: str) -> Path:
    """Return the file of a component."""
    folders = (ROOT / "components", ROOT / "operations" / "tuning")
    return next(path for folder in folders if (path := folder / f"{name}.py").exists())


def write(folder: Path, owners: dict[str, list[str]], links: dict[str, str]) -> list[Path]:
    """Write our part of the catalog, with `owners` at GitHub and `links`; return components' folders."""
    for category in {entry.category for entry in ENTRIES.values()}:
        shutil.rmtree(folder / "components" / category / GROUP, ignore_errors=True)  # An earlier version's.
    verified = datetime.now(UTC).replace(microsecond=0)
    groups: dict[Path, dict[str, tuple[str, Component]]] = {}
    folders = []
    for name, entry in ENTRIES.items():
        component = convert(file_of(name).read_text(), IMAGE, STEP_ARGUMENTS)
        metadata: dict[str, Any] = {
            "name": f"{GROUP}_{name}",
            "stability": _STABILITY,
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
            "README.md": _page(component, metadata, owners),
        }
        _write(place, files)
        groups.setdefault(group, {})[name] = (metadata["name"], component)
        folders.append(place)
    for group, components in groups.items():
        docstring = f'"""Components of kubedet: {", ".join(components)}."""\n'
        readme = _index(GROUP, components)
        _write(group, {"__init__.py": docstring, "OWNERS": _yaml(owners), "README.md": readme})
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


@dataclass(frozen=True)
class Component:
    """A component in the catalog's form."""

    name: str
    text: str  # Its module.
    overview: str
    arguments: tuple[tuple[str, str, str], ...]  # Name, type and meaning of each.
    returns: tuple[str, str] | None  # Type and meaning of the result.


def convert(text: str, image: str, meanings: Mapping[str, str]) -> Component:
    """Convert a module with one component so that it imports none of ours; `meanings` describe arguments."""
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    overview = ast.get_docstring(function) or ""
    arguments = tuple((item.arg, ast.unparse(item.annotation), meanings[item.arg])
                      for item in function.args.args if item.annotation)  # fmt: skip
    returned = ast.unparse(function.returns) if function.returns else "None"
    docstring = [f'"""{overview}', "", "Args:", *(f"    {name}: {text}" for name, _, text in arguments)]
    docstring += [] if returned == "None" else ["", "Returns:", f"    {_RESULT}"]
    # One line for each argument, for the generator's tables.
    docstring += ['"""' + ("  # noqa: E501" if any(len(line) > _WIDTH - 4 for line in docstring) else "")]
    lines = text.splitlines()
    old = function.body[0]
    lines[old.lineno - 1 : old.end_lineno] = textwrap.indent("\n".join(docstring), "    ").splitlines()
    lines = [line for line in lines if not line.startswith("from components.images import")]
    written = "\n".join(lines).replace("base_image=COMPONENT_IMAGE", f'base_image="{image}"')
    written = written.replace("from kfp import dsl\n\n\n\n", "from kfp import dsl\n\n\n")
    # The catalog would list "None" as an output.
    written = written.replace("\n) -> None:", "\n):")
    result = None if returned == "None" else (returned, _RESULT)
    return Component(
        function.name, written + _COMPILED.format(name=function.name), overview, arguments, result
    )


def _page(component: Component, metadata: dict[str, Any], owners: dict[str, list[str]]) -> str:
    """Return a component's page from it and the content of `metadata.yaml` and `OWNERS`."""
    parts = [f"# {_title(metadata['name'])} ✨"]
    parts.append(f"> ⚠️ **Stability: {_STABILITY}** — This asset is not yet stable and may change.")
    parts += ["## Overview 🧾", _wrapped(component.overview), "## Inputs 📥"]
    # The catalog's generator writes None for required arguments.
    rows = [
        f"| `{name}` | `{kind}` | `None` | {description} |" for name, kind, description in component.arguments
    ]
    head = ["| Parameter | Type | Default | Description |", "|-----------|------|---------|-------------|"]
    parts.append("\n".join([*head, *rows]))
    if component.returns:
        kind, description = component.returns
        head = ["| Name | Type | Description |", "|------|------|-------------|"]
        parts += ["## Outputs 📤", "\n".join([*head, f"| Output | `{kind}` | {description} |"])]
    links = metadata.get("links", {})
    shown = {name: value for name, value in metadata.items() if name != "links"} | {"owners": owners}
    parts += ["## Metadata 🗂️", "\n".join(f"- **{_title(name)}**:{_value(shown[name])}" for name in shown)]
    if links:
        lines = [f"- **{_title(name)}**: [{url}]({url})" for name, url in links.items()]
        parts += ["## Additional Resources 📚", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _index(group: str, components: dict[str, tuple[str, Component]]) -> str:
    """Return the page of a group: by folder the name in `metadata.yaml` and the component."""
    lines = sorted(
        (_title(name), f"- [{_title(name)}](./{folder}/README.md): {item.overview.splitlines()[0][:_WIDTH]}")
        for folder, (name, item) in components.items()
    )
    group = _title(group)
    head = f"# {group}\n\nThis subcategory contains components in the **{group}** group:\n\n"
    return head + "\n".join(line for _, line in lines) + "\n"


def _title(name: str) -> str:
    """Return a name in snake_case or camelCase as a heading."""
    words = "".join(f" {sign}" if sign.isupper() else sign for sign in name).replace("_", " ").split()
    return " ".join(word.capitalize() for word in words)


def _wrapped(text: str) -> str:
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(
        textwrap.fill(part, _WIDTH, break_long_words=False, break_on_hyphens=False) for part in paragraphs
    )


def _value(value: Any, depth: int = 0) -> str:
    """Format a value of the metadata for a list: after the colon, or in lines below it."""
    below = "\n" + "  " * (depth + 1) + "- "
    if isinstance(value, dict):
        return "".join(f"{below}{_title(name)}:{_value(item, depth + 1)}" for name, item in value.items())
    if isinstance(value, list):
        return "".join(below + _item(item) for item in value)
    return f" {value}"


def _item(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_title(name)}: {item}" for name, item in value.items())
    return str(value)


def main() -> None:
    """Write the files of the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m community", description=__doc__)
    parser.add_argument(
        "--owner", action="append", required=True, metavar="NAME",
        help="GitHub name of an approver, a member of Kubeflow's community; may be repeated",
    )  # fmt: skip
    parser.add_argument("--reviewer", action="append", default=[], metavar="NAME", help="of a reviewer")
    parser.add_argument("--documentation", metavar="URL", help="address of the documentation")
    parser.add_argument(
        "-o", "--output", default="build/community", metavar="DIR",
        help="folder to write, or a clone of the catalog (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    owners = {"approvers": options.owner} | ({"reviewers": options.reviewer} if options.reviewer else {})
    links = {"documentation": options.documentation} if options.documentation else {}
    folders = write(Path(options.output), owners, links)
    print(f"wrote {len(folders)} components to {options.output}/components")


if __name__ == "__main__":
    main()
