"""A component's module as the community takes it: it imports Python and kfp alone, and names its image."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from docstring_parser import Docstring, parse

from pipelines.parameters import ELSEWHERE

_OWN_IMAGE = "components.images"
_TOLD_ELSEWHERE = re.compile(rf"^( +(\w+): ){re.escape(ELSEWHERE)}$", re.MULTILINE)
_WIDTH = 120
"""Characters of a line that the catalogue's linter allows."""


@dataclass(frozen=True)
class Component:
    """A component in the catalogue's form."""

    name: str
    text: str
    """Its module."""
    overview: str
    arguments: tuple[tuple[str, str, str], ...]
    """Name, type and meaning of each."""
    returns: tuple[str, str] | None
    """Type and meaning of the result."""


def convert(text: str, image: str, meanings: Mapping[str, str]) -> Component:
    """Convert the text of a module with one component so that it imports none of our modules.

    `meanings` describe the arguments that are parameters of the pipeline.
    """
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module == _OWN_IMAGE:
            del lines[node.lineno - 2 : node.lineno]  # With the empty line before it.
    written = "\n".join(lines).replace("base_image=COMPONENT_IMAGE", f'base_image="{image}"')
    # The catalogue would list "None" as an output.
    written = written.replace("\n) -> None:", "\n):")
    written = _TOLD_ELSEWHERE.sub(lambda match: match[1] + meanings[match[2]], written)
    if any(len(line) > _WIDTH for line in written.splitlines()):
        # One line for each argument, for the generator's tables.
        written = written.replace('\n    """\n', '\n    """  # noqa: E501\n', 1)
    function = _function(written)
    docstring = parse(ast.get_docstring(function) or "")
    descriptions = {item.arg_name: item.description or "" for item in docstring.params}
    returned = ast.unparse(function.returns) if function.returns else "None"
    return Component(
        name=function.name,
        text=written + _COMPILED.format(name=function.name),
        overview="\n\n".join(filter(None, (docstring.short_description, docstring.long_description))),
        arguments=tuple(
            (item.arg, ast.unparse(item.annotation), descriptions[item.arg])
            for item in function.args.args
            if item.annotation
        ),
        returns=None if returned == "None" else (returned, _meaning(docstring)),
    )


_COMPILED = """


if __name__ == "__main__":
    from kfp.compiler import Compiler

    Compiler().compile({name}, package_path=__file__.replace(".py", "_component.yaml"))
"""


def _function(text: str) -> ast.FunctionDef:
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return function


def _meaning(docstring: Docstring) -> str:
    return (docstring.returns.description or "") if docstring.returns else ""
