"""Meaning, label, default and type of the specification's fields, for command-line options and forms."""

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from components.launchers.spec import JobSpec

_FIELDS: Mapping[str, FieldInfo] = vars(JobSpec)["__pydantic_fields__"]


def meaning(name: str) -> str:
    """Return what a field means as a phrase: without capital and full stop."""
    text = " ".join((_FIELDS[name].description or "").split()).removesuffix(".")
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def label(name: str) -> str:
    """Return the label of a field in a form."""
    return _FIELDS[name].title or name.capitalize()


def default(name: str) -> Any:
    """Return the default of a field."""
    return _FIELDS[name].default


def is_number(name: str) -> bool:
    """Return whether a field is a whole number."""
    return _FIELDS[name].annotation is int
