"""Pages of the catalogue, in the form that its own generator writes and its checks compare."""

import textwrap
from datetime import datetime
from typing import Any

from community.source import Component

STABILITY = "alpha"
"""The catalogue's word for a component that others have not used yet."""

_WIDTH = 120


def page(component: Component, metadata: dict[str, Any], owners: dict[str, list[str]]) -> str:
    """Return a component's page from it and the content of `metadata.yaml` and `OWNERS`."""
    parts = [f"# {title(metadata['name'])} ✨"]
    parts.append(f"> ⚠️ **Stability: {STABILITY}** — This asset is not yet stable and may change.")
    parts += ["## Overview 🧾", _wrapped(component.overview), "## Inputs 📥"]
    # The catalogue's generator writes None for required arguments.
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
    parts += ["## Metadata 🗂️", "\n".join(f"- **{title(name)}**:{_value(shown[name])}" for name in shown)]
    if links:
        lines = [f"- **{title(name)}**: [{url}]({url})" for name, url in links.items()]
        parts += ["## Additional Resources 📚", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def index(group: str, components: dict[str, tuple[str, Component]]) -> str:
    """Return the page of a group: by folder the name in `metadata.yaml` and the component."""
    lines = sorted(
        (title(name), f"- [{title(name)}](./{folder}/README.md): {item.overview.splitlines()[0][:_WIDTH]}")
        for folder, (name, item) in components.items()
    )
    group = title(group)
    head = f"# {group}\n\nThis subcategory contains components in the **{group}** group:\n\n"
    return head + "\n".join(line for _, line in lines) + "\n"


def title(name: str) -> str:
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
        return "".join(f"{below}{title(name)}:{_value(item, depth + 1)}" for name, item in value.items())
    if isinstance(value, list):
        return "".join(below + _item(item) for item in value)
    return f" {value}"


def _item(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{title(name)}: {item}" for name, item in value.items())
    return str(value)


def timestamp(moment: datetime) -> str:
    """Return a time in the catalogue's format."""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
