"""Plan what an image installs: runs in the base image with Python alone, and writes files for pip.

A torch of the base image, built for its drivers, is kept with its CUDA packages; every other package has the
tested version and the hashes of the image's lock.
"""

import argparse
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

_TORCH = re.compile(r"(torch|torchvision|(pytorch-)?triton|nvidia-.+|cuda-.+)")
"""Torch and its packages, which fit together only as a set."""


def plan(
    project: dict, pins: dict[str, str], lock: dict[str, str], installed: dict[str, str], extras: list[str]
) -> dict[str, str]:
    """Return the texts of pip's files.

    `project` is that table of pyproject.toml; `pins`, `lock`, `installed` are tested versions, lines of the
    image's lock, and versions of the base, by normalised name; the extra `client` is what is not optional.
    `build.txt` builds our wheel, `torch.txt` is torch's set (empty if the base has torch), `packages.txt` the
    rest; pip checks with `requirements.txt` and `constraints.txt` that nothing is missing.
    """
    kept = {name: version for name, version in installed.items() if _TORCH.fullmatch(name)}
    kept = kept if "torch" in kept else {}
    tested = {name: version for name, version in pins.items() if _TORCH.fullmatch(name)}
    others = {name: version for name, version in pins.items() if name not in tested}
    needed = list(dict.fromkeys(_requirements_of(project, extras)))
    # A torchvision for the base's torch has no tested version and no hash.
    fitted = {name for name in lock if name in ("torch", "torchvision")} if kept else set()
    needed = needed if fitted - installed.keys() else ["--no-index", *needed]
    return {
        "build.txt": lock["setuptools"],
        "torch.txt": "".join(text for name, text in lock.items() if _TORCH.fullmatch(name) and not kept),
        "packages.txt": "".join(text for name, text in lock.items() if not _TORCH.fullmatch(name)),
        "constraints.txt": _lines(others | (kept or tested)),
        "requirements.txt": "".join(f"{line}\n" for line in needed),
    }


def _requirements_of(project: dict, extras: list[str]) -> list[str]:
    """Return the requirements of extras, which may name other extras of this project."""
    steps, groups = [], project["optional-dependencies"] | {"client": project["dependencies"]}
    for extra in extras:
        for line in groups[extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", line)
            steps += _requirements_of(project, own[1].split(",")) if own else [line]
    return steps


def _lines(versions: dict[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _normalize(name: str) -> str:
    """Return the normalised name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """Return the versions of a constraints file by normalised name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {_normalize(name): version for name, version in pairs}


def read_lock(text: str, *, hashes: bool = True) -> dict[str, str]:
    """Return the lines of each package of a lock; without hashes, another index's files fit too."""
    entries: dict[str, str] = {}
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        pin = entry.partition("--hash")[0].rstrip().removesuffix("\\").rstrip()
        entries[_normalize(pin.partition("==")[0])] = entry if hashes else f"{pin}\n"
    return entries


def main() -> None:
    """Write the plan's files into a folder."""
    if sys.version_info < (3, 11):  # noqa: UP036 (the base image's, not the one we are tested with)
        sys.exit(f"error: BASE has Python {sys.version.split()[0]}; choose one with 3.11 or newer")
    import tomllib  # Older Pythons have none, and shall read the message above.

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="folder of pyproject.toml")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--extras", default="", help="optional dependencies, separated by commas")
    parser.add_argument("--lock", type=Path, required=True, help="requirements of the image, with hashes")
    parser.add_argument("--hashes", default="1", help="empty: do not check hashes")
    options = parser.parse_args()
    files = plan(
        tomllib.loads((options.project / "pyproject.toml").read_text())["project"],
        read_pins((options.project / "constraints.txt").read_text()),
        read_lock(options.lock.read_text(), hashes=bool(options.hashes)),
        {_normalize(item.metadata["Name"]): item.version for item in distributions()},
        [extra for extra in options.extras.split(",") if extra],
    )
    options.output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.output / name).write_text(text)


if __name__ == "__main__":
    main()
