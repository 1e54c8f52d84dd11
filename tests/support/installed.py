"""What pip would install of this project, told by what is installed here."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def extras_of(image):
    """Return what a Dockerfile tells `images/check.py`."""
    text = (ROOT / "images" / f"{image}.Dockerfile").read_text()
    return re.search(r"check\.py --extras (\S+)", text)[1].split(",")


def needed(extras):
    """Return the names of all packages of these extras; `client` is what is no extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"] | {"client": project["dependencies"]}
    own, waiting = project["name"], [Requirement(text) for extra in extras for text in optional[extra]]
    seen = set()
    while waiting:
        one = waiting.pop()
        for extra in ["", *one.extras]:
            if (one.name, extra) in seen:
                continue
            seen.add((one.name, extra))
            # This project's are read where they stand: what is installed may be older.
            texts = optional.get(extra, []) if one.name == own else metadata.requires(one.name) or []
            for below in map(Requirement, texts):
                if not below.marker or below.marker.evaluate({"extra": extra}):
                    waiting.append(below)
    return {canonicalize_name(name) for name, _ in seen} - {own}


def view(extras, folder):
    """Link what these extras bring into a folder, which is then a site-packages without all else."""
    for name in needed(extras):
        distribution = metadata.distribution(name)
        # Programs and headers lie outside of site-packages.
        for top in {file.parts[0] for file in distribution.files or [] if ".." not in file.parts}:
            link = folder / top
            if not link.exists() and top != "__pycache__":
                link.symlink_to(distribution.locate_file(top))
