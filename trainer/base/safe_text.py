"""Handles untrusted text: redacts secrets, sanitizes names, and parses JSON and YAML within limits."""

import json
import re
import unicodedata
from collections.abc import Hashable
from functools import cache
from typing import Any

MAX_DEPTH = 100  # maximum nesting of lists and mappings
MAX_VALUES = 100_000  # maximum number of values in a text
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_DIGITS = 18
_SPACES = re.compile(r"(\s+)")
_AUTHORITY = re.compile(r"://([^/?#\s]*)")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^\[\]@:]*)(:[0-9]+)?")
_SIGNATURE = re.compile(
    r"(?i)([?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token)=)"
    r"[^&\s]+"
)
_JOINERS = {"\u200c", "\u200d"}  # format characters within words (Persian, Indic scripts) and emoji


class TooLargeError(ValueError):
    """A text that is too long, is nested too deeply, or contains too many values."""


def redact(text: str) -> str:
    """Remove user names, passwords and signatures from the addresses in a text.

    A password may contain any character, so everything before the last @ is removed. `http://host:9000/a@b`
    is a valid address without a password and is kept.
    """
    if "://" in text and "@" in text:
        words = _SPACES.split(text)
        for number, word in enumerate(words):
            if (start := _userinfo_start(word)) is not None:
                words[number] = f"{word[:start]}***{word[word.rindex('@') :]}"
        text = "".join(words)
    return _SIGNATURE.sub(r"\1***", text)


def has_userinfo(text: str) -> bool:
    """Return whether an address in a text has a user name or a password before its host."""
    return "://" in text and any(_userinfo_start(word) is not None for word in _SPACES.split(text))


def _userinfo_start(word: str) -> int | None:
    end = word.rfind("@")
    for match in _AUTHORITY.finditer(word):
        if match.start(1) <= end and not _HOST.fullmatch(match[1]):
            return match.start(1)
    return None


def to_one_line(text: str) -> str:
    """Replace line breaks, tabs, control characters and bidirectional controls by spaces.

    The result is in Unicode's composed form (NFC).
    """
    characters = list(unicodedata.normalize("NFC", text))
    for number, character in enumerate(characters):
        category = unicodedata.category(character)
        if category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in _JOINERS):
            characters[number] = " "
    return "".join(characters)


def make_printable(text: str) -> str:
    """Sanitize a text for terminals: like `to_one_line`, but keep line breaks."""
    return "\n".join(map(to_one_line, text.split("\n")))


def format_message(text: str) -> str:
    """Sanitize a message with `make_printable` and indent all lines after the first.

    A line break in a name thus cannot imitate another message.
    """
    return make_printable(re.sub(r"\n(?!\s)", "\n  ", text))


def display_width(text: str) -> int:
    """Return the number of terminal columns that a text occupies; a Chinese character takes two."""
    from rich.cells import cell_len

    return cell_len(text)


def align(text: str, width: int, *, right: bool = False) -> str:
    """Fit a text into one line of `width` columns: pad it with spaces, or truncate it with `…`."""
    from rich.cells import set_cell_size

    line = to_one_line(text)
    if display_width(line) > width:
        line = set_cell_size(line, width - 1).rstrip() + "…"
    padding = " " * (width - display_width(line))
    return padding + line if right else line + padding


def parse_digits(text: str) -> int | None:
    """Parse at most 18 decimal digits; return None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise TooLargeError if it is too large or too deep, ValueError if invalid."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooLargeError(_TOO_DEEP) from None
    return _check_limits(value)


def parse_yaml(text: str | bytes, max_length: int, *, plain_text: bool = False) -> Any:
    """Parse YAML with JSON's types only; reject duplicate keys and aliases. Dates remain text.

    With `plain_text`, numbers, `true` and `null` remain text too. Parsing 100,000 characters may take 1 s.

    Raises:
        TooLargeError: it has more than `max_length` characters or bytes, or is too deep or large.
        ValueError: it is invalid; the message has one line.
    """
    import yaml

    if len(text) > max_length:
        raise TooLargeError(f"longer than {max_length} characters")
    if isinstance(text, bytes) and not text.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"line {line} is not UTF-8: save the file as UTF-8") from None
    try:
        value = yaml.load(text, _loader(plain_text))  # noqa: S506 - it derives from a safe loader
    except RecursionError:
        raise TooLargeError(_TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise ValueError(_yaml_problem(error)) from None
    except (TypeError, AttributeError, LookupError, OverflowError) as error:  # PyYAML's, for unsuitable tags
        raise ValueError(f"a value cannot be read ({error})") from None
    return _check_limits(value)


def _yaml_problem(error: Any) -> str:
    """Return the message of PyYAML's error as one line, with the line number."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = f"line {mark.line + 1}: {error.problem}"
    if error.context_mark:
        problem += f" ({error.context}, line {error.context_mark.line + 1})"
    if r"'\t'" in problem:
        problem += ": indent with spaces, not tabs"
    return problem


@cache
def _loader(plain_text: bool) -> Any:
    import yaml

    base = yaml.BaseLoader if plain_text else yaml.SafeLoader

    class Loader(base):  # type: ignore[misc, valid-type]
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.events.AliasEvent):  # A few of them can expand to millions of values.
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
            node: yaml.Node | None = super().compose_node(parent, index)
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = set()
            for key, _ in getattr(node, "value", []):
                name = self.construct_object(key)
                if name in keys:
                    problem = f"{name!r} occurs twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(name)
            return dict(super().construct_mapping(node, deep))

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_limits(value: Any) -> Any:
    """Return a parsed value if it is within the limits and has only JSON types."""
    pending, count = [(value, 0)], 0
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise TooLargeError(f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise TooLargeError(_TOO_DEEP)
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str):
                    raise ValueError(f"the key {str(key)[:40]} is not a string: put it in quotes")
            pending += [(part, depth + 1) for part in node.values()]
        elif isinstance(node, list):
            pending += [(part, depth + 1) for part in node]
        elif not isinstance(node, str | int | float | None):
            raise ValueError(f"{str(node)[:40]} is not a string, number, true, false, null, list or mapping")
    return value
