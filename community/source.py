"""A component's module as the community takes it: it imports Python and kfp alone, and names its image."""

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

_OWN_IMAGE = "components.images"
_RESULT = "A word or line about the outcome, see above."
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

    `meanings` are the descriptions of all arguments, which the docstring then lists.
    """
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
    lines = [line for line in lines if not line.startswith(f"from {_OWN_IMAGE} import")]
    written = "\n".join(lines).replace("base_image=COMPONENT_IMAGE", f'base_image="{image}"')
    written = written.replace("from kfp import dsl\n\n\n\n", "from kfp import dsl\n\n\n")
    # The catalogue would list "None" as an output.
    written = written.replace("\n) -> None:", "\n):")
    result = None if returned == "None" else (returned, _RESULT)
    return Component(
        function.name, written + _COMPILED.format(name=function.name), overview, arguments, result
    )


_COMPILED = """


if __name__ == "__main__":
    from kfp.compiler import Compiler

    Compiler().compile({name}, package_path=__file__.replace(".py", "_component.yaml"))
"""
