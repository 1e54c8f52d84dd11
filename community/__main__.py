"""Write the components in the form of the community's repository."""

import argparse
import shutil
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from community import readme, source
from pipelines.kubeflow import OLDEST
from pipelines.parameters import STEP_ARGUMENTS

ROOT = Path(__file__).parents[1]

GROUP = "kubedet"
"""The folder of our components below each category."""

IMAGE = f"ghcr.io/kubeflow/pipelines-components-{GROUP}:main"
"""The image that the community builds from our Containerfile; its checks allow no other registry."""

EXTRAS = "pipeline,signing,registry,mlflow,wandb,detr,lineage,tune"
"""Extras of the steps, as in `images/component.Dockerfile`."""

_PIPELINES = ("Pipelines", f">={OLDEST[0]}.{OLDEST[1]}.0")
_TRAINER = ("Trainer", ">=2.3.0")


@dataclass(frozen=True)
class Entry:
    """One component."""

    category: str
    """Folder of the catalogue."""
    tags: tuple[str, ...]
    kubeflow: tuple[tuple[str, str], ...] = (_PIPELINES,)
    """Required parts of Kubeflow with their versions."""


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


class _Dumper(yaml.SafeDumper):
    """Indents lists, as the catalogue's linter requires."""

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
    """Write our part of the catalogue into an empty folder or a clone of it; return the components' folders.

    `owners` are names at GitHub, `links` addresses that each page shows.
    """
    for category in {entry.category for entry in ENTRIES.values()}:
        shutil.rmtree(folder / "components" / category / GROUP, ignore_errors=True)  # An earlier version's.
    verified = datetime.now(UTC).replace(microsecond=0)
    groups: dict[Path, dict[str, tuple[str, source.Component]]] = {}
    folders = []
    for name, entry in ENTRIES.items():
        component = source.convert(file_of(name).read_text(), IMAGE, STEP_ARGUMENTS)
        metadata: dict[str, Any] = {
            "name": f"{GROUP}_{name}",
            "stability": readme.STABILITY,
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
        groups.setdefault(group, {})[name] = (metadata["name"], component)
        folders.append(place)
    for group, components in groups.items():
        docstring = f'"""Components of kubedet: {", ".join(components)}."""\n'
        _write(
            group,
            {"__init__.py": docstring, "OWNERS": _yaml(owners), "README.md": readme.index(GROUP, components)},
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
        help="folder to write, or a clone of the catalogue (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    owners = {"approvers": options.owner} | ({"reviewers": options.reviewer} if options.reviewer else {})
    links = {"documentation": options.documentation} if options.documentation else {}
    folders = write(Path(options.output), owners, links)
    print(f"wrote {len(folders)} components to {options.output}/components")


if __name__ == "__main__":
    main()
