"""Write the pages of the site: the repository's documents, tables from the code, and a page per module.

Documents keep their paths, so links between them are the same here and in the repository. A link to a folder
leads to its page, a link to a module to that module's page.
"""

import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent
EXAMPLES = "deploy/examples/jobs/README.md"  # Generated from the examples.
PUBLISHED = "docs/published.md"

DOCUMENTS = {
    "Home": "README.md",
    "Guides": {
        "Install": "docs/install.md",
        "Your data": "docs/data.md",
        "Train": {
            "Train": "docs/training.md",
            "Weights and trackers": "docs/weights.md",
            "Search": "docs/tuning.md",
            "Published recipes": PUBLISHED,
        },
        "Evaluate": "docs/evaluation.md",
        "Serve": "docs/serving.md",
        "Kubeflow": {
            "Pipeline": "docs/kubeflow.md",
            "Training jobs": "docs/jobs.md",
            "Networks": "docs/networks.md",
            "Cluster files": "deploy/README.md",
            "Example jobs": EXAMPLES,
        },
        "Operations": {"Operations": "docs/operations.md", "On call": "docs/troubleshooting.md"},
        "Python": "docs/python.md",
        "Reference": "docs/reference.md",
    },
    "Design": {
        "Architecture": "docs/architecture.md",
        "Detectors": "docs/detectors.md",
        "Reliability": "docs/reliability.md",
        "Performance": "docs/performance.md",
        "Log of measurements": "dev/LOG.md",
    },
    "Project": {
        "How to work on it": "AGENTS.md",
        "Contributing": "CONTRIBUTING.md",
        "Tests on a cluster": "tests/cluster/README.md",
        "Changes": "CHANGELOG.md",
        "Security": "SECURITY.md",
    },
}
PACKAGES = {
    "kubedet": "Python interface",
    "trainer": "What runs in a training pod",
    "components": "Steps and launchers",
    "operations": "Operation over months",
    "pipelines": "Pipeline and command line",
}
_FOUND_FIRST = "---\nsearch:\n  boost: 4\n---\n\n"
"""The site's search lists guides before modules."""

_ITEM = re.compile(r" *(?:[-*]|\d+\.) +(?=\S)")
_CODE = 4
"""Columns by which code is indented."""

_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def write(folder: Path) -> Path:
    """Write pages and settings into an empty folder.

    Returns:
        The settings, for mkdocs.
    """
    pages = folder / "pages"
    for name in _names(DOCUMENTS):
        text = _examples() if name == EXAMPLES else (ROOT / name).read_text()
        text = text + _published() if name == PUBLISHED else text
        first = _FOUND_FIRST if name in _names(DOCUMENTS["Guides"]) else ""
        _write(pages / name, first + _with_lists(_with_links(text, Path(name).parent, pages)))
    for name in ("site.css", "favicon.svg"):
        shutil.copy(SITE / name, pages)
    settings = yaml.safe_load((SITE / "mkdocs.yml").read_text())
    (python,) = (item["mkdocstrings"] for item in settings["plugins"] if "mkdocstrings" in item)
    python["handlers"]["python"]["paths"] = [str(ROOT)]
    modules = [{f"{package}: {said}": _modules(ROOT / package, pages)} for package, said in PACKAGES.items()]
    settings["nav"] = [*_nav(DOCUMENTS), {"API": modules}]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    settings["copyright"] = f"kubedet {version}, {settings['copyright']}"
    settings |= {"docs_dir": pages.name, "site_dir": "site"}
    _write(folder / "mkdocs.yml", yaml.safe_dump(settings, sort_keys=False))
    return folder / "mkdocs.yml"


def _names(tree: dict | str) -> list[str]:
    return [tree] if isinstance(tree, str) else [name for below in tree.values() for name in _names(below)]


def _nav(tree: dict) -> list:
    return [{title: below if isinstance(below, str) else _nav(below)} for title, below in tree.items()]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _with_links(text: str, place: Path, pages: Path) -> str:
    """Return a document whose links to folders, modules and files lead to what the site has of them."""

    def changed(link: re.Match[str]) -> str:
        target = (ROOT / place / link[1]).resolve()
        if target.is_dir():
            return f"{link[1]}/README.md"
        if target.suffix == ".py":
            name = target.relative_to(ROOT)
            return "/".join([".."] * len(place.parts) + ["api", *name.parts]).replace(".py", ".md")
        if target.suffix != ".md" and target.is_file():
            copy = pages / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)
        return link[1]

    return _LINK.sub(changed, text)


def _with_lists(text: str) -> str:
    """Return a document in which what belongs to an item of a list stands four columns in.

    Elsewhere it stands where the item's own words begin, two or three columns in; to Python-Markdown, which
    the site is made with, code that stands there is a part of the sentence above it.
    """
    lines, items, fenced = [], [], False  # Of each item around a line: the columns of its words, old and new.
    for line in text.splitlines():
        column = len(line) - len(line.lstrip())
        while items and line.strip() and column < items[-1][0]:
            items.pop()
        old, new = items[-1] if items else (0, 0)
        lines.append(" " * (new - old) + line if line.strip() else "")
        fenced ^= line.lstrip().startswith("```")
        mark = _ITEM.match(line)
        if mark and not fenced and column - old < _CODE:
            items.append((mark.end(), column + new - old + _CODE))
    return "\n".join(lines) + "\n"


def _examples() -> str:
    parts = ["# Example jobs", "Each is a specification that `kubedet job submit --spec FILE` takes."]
    for path in sorted((ROOT / "deploy/examples/jobs").glob("*.yaml")):
        parts += [f"## {path.name}", f"```yaml\n{path.read_text()}```"]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _published() -> str:
    """Return the published values of recipes, and what differs, as tables."""
    rows = yaml.safe_load((ROOT / "tests/trainer/published_differences.yaml").read_text())
    text = f"\n## Differences\n\n{_table(('recipes', 'key', 'published', 'ours', 'reason'), rows)}\n"
    text += "\n## Published values\n"
    for group in yaml.safe_load((ROOT / "tests/trainer/published_recipes.yaml").read_text()):
        names = group["recipes"]
        rows = [(key, *values[1:], values[0]) for key, values in group.get("keys", {}).items()]
        for file, common in group.get("common", {}).items():
            rows += [(key, *[value] * len(names), file) for key, value in common.items()]
        text += f"\n### {', '.join(names)}\n\n{_table(('key', *names, 'file'), rows)}\n"
    return text


def _modules(folder: Path, pages: Path) -> list:
    """Write the pages of a package; returns its part of the navigation."""
    documents = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            documents.append({path.name: _modules(path, pages)})
        elif path.suffix == ".py" and path.stem != "__main__":
            package = path.stem == "__init__"
            name = ".".join(path.relative_to(ROOT).parts[: -1 if package else None]).removesuffix(".py")
            page = Path("api", *path.relative_to(ROOT).parts).with_suffix(".md")
            page = page.with_name("index.md") if package else page
            _write(pages / page, f"# `{name}`\n\n::: {name}\n")
            documents.append({name if package else path.stem: str(page)})
    return documents


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    print(write(Path(sys.argv[1]).resolve()))
