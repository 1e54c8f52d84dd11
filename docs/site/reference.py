"""Write docs/reference.md: commands, recipes, configuration keys, pipeline parameters and job fields.

.venv/bin/python docs/site/reference.py
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference.md"


def reference() -> str:
    """Return the page."""
    sys.path.insert(0, str(ROOT))
    from components.launchers.spec import JobSpec
    from kubedet import api
    from trainer.config.explanations import explain

    parts = [
        "# Reference",
        "This page is generated from the code (`python docs/site/reference.py`). "
        "`kubedet COMMAND --help` prints the same texts.",
        "## Commands",
        "Each command is also a [function of Python](python.md): `kubedet data inspect` is "
        "`kubedet.data_inspect`, and `--set` is `overrides`.",
        *_commands(),
        "## Recipes",
        "`--recipe NAME` selects one. [Published recipes](published.md) compares them with their sources.",
        _table(("recipe", "purpose"), [(f"`{name}`", text) for name, text in api.recipes_list().items()]),
        "## Hyper-parameters",
        "Change them with `--set KEY=VALUE`, or with the pipeline's parameter `overrides`. A key with a "
        "detector's name belongs to that detector only.",
        _fields(api.recipes_explain()),
        "## Pipeline parameters",
        "`kubedet submit` and `schedule create` have options of the same names (`--set` for `overrides`).",
        _table(("name", "default", "meaning"), _parameters()),
        "## Job fields",
        "Fields of a specification for `kubedet job submit --spec FILE`, and of the pipeline's parameter "
        "`job`.",
        _fields(explain(JobSpec)),
    ]
    return "\n\n".join(parts) + "\n"


def _commands() -> Iterator[str]:
    from kubedet.cli import COMMANDS, options_of
    from kubedet.commands import Docstring

    for name, entry in COMMANDS.items():
        yield f"### kubedet {name}"
        yield Docstring.read(entry.function).text
        rows = []
        for option in options_of(entry):
            words = f"{', '.join(option.flags)} {option.written}".strip()
            default = f" (default: {option.default})" if option.shows_default else ""
            rows.append((f"`{words}`", f"{option.help}{default}"))
        if rows:
            yield _table(("option", "meaning"), rows)


def _parameters() -> Iterator[tuple[str, str, str]]:
    from kubedet.commands import Docstring
    from pipelines.pipeline import default_parameters
    from pipelines.pipeline_run import PipelineRun

    meanings = Docstring.read(PipelineRun).parameters
    for name, default in default_parameters(volume=False).items():
        yield f"`{name}`", _default(default), meanings[name]


def _fields(items: Iterable) -> str:
    rows = [
        (
            f"`{item.name}`",
            _default(item.value),
            f"{item.variant}: {item.meaning}" if item.variant else item.meaning,
        )
        for item in items
    ]
    return _table(("name", "default", "meaning"), rows)


def _default(default: object) -> str:
    if default in (inspect.Parameter.empty, "(required)"):
        return "(required)"
    return f"`{default}`" if default not in ("", '""') else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(reference())
