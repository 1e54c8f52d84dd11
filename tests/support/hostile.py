"""What nobody should hand in, and what must come of it: a message, soon, in little memory, and no traceback.

`KUBEDET_FUZZ=20` tries twenty times as many examples, drawn anew in each run; else they are always the same.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (some commands import it, which takes seconds)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kubedet import cli
from trainer.base.errors import KubedetError

TIMES = int(os.environ.get("KUBEDET_FUZZ", "1"))
SECONDS = 5.0
"""Of the processor, which other programs do not take part of."""
BYTES = 500_000_000
DEEP = 1500


def examples(count: int) -> Any:
    """Return hypothesis' settings for so many examples, the same in each run unless KUBEDET_FUZZ is set."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def tried(call: Callable[[], Any]) -> Any:
    """Call something, and hold it against the limits of time and memory; returns what it returns.

    Refused it may be, with a message that says what to do.
    """
    before, began = _memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # The most so far is from now on what there is now.
    try:
        return call()
    except KubedetError as error:
        assert error.message.strip(), repr(error)
        return error
    finally:
        spent, grown = time.process_time() - began, _memory("VmHWM") - before
        assert spent < SECONDS, f"it took {spent:.1f} s"
        assert grown < BYTES, f"it took {grown:,} bytes"


def refused(*words: str, capsys: Any = None, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """Run a command of kubedet; returns what it prints to stderr, which has a remedy if it failed."""

    def run() -> int:
        try:
            return cli.main(list(words))
        except SystemExit as end:  # argparse's
            return int(end.code or 0)

    code = tried(run)
    shown = capsys.readouterr() if capsys else None
    message = shown.err if shown else ""
    assert code in codes, (code, words)
    if shown and code:
        assert "Traceback" not in shown.out + message
        assert "error: " in message and ("fix: " in message or "usage: " in message), message[-2000:]
    return message


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


extremes = [0, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, 1e308, 5e-324, -0.0]
odd_numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(extremes))
odd_texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "~",
            "null",
            "-",
            "[]",
            "\0",
            "\ud800",
            "\u202e",
            "\x1b[2J",
            "a" * 6000,
            "${HOME}",
            "\r\n",
            "1e999",
            "NaN",
            ".inf",
            "file://[",
            "http://[::1",
            "s3://a b/c",
            "é" * 200,
            "9" * 5000,
            "日本",
            "\U0001f600",
            "a\nb: c",
            "!!python/name:os.system",
            "*a",
            "'",
            '"',
        ]
    ),
)
leaves = st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(odd_texts, inner, max_size=4),
    ),
    max_leaves=8,
)
"""Anything that JSON can say, and some that it cannot."""

deep = st.sampled_from(["[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP, "[" * 90 + "]" * 90, "{" * 200])


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list) else [])
    return [path, *(each for key, part in pairs for each in places(part, (*path, key)))]


@st.composite
def spoiled(draw: Any, whole: Any) -> Any:
    """Draw a tree of which one to three values are another, lack, or stand twice."""
    tree = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(tree)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(values)
            continue
        holder = tree
        for key in path[:-1]:
            holder = holder[key]
        what = draw(st.sampled_from(["other", "other", "other", "gone", "more"]))
        if what == "gone":
            del holder[path[-1]]
        elif what == "more" and isinstance(holder, list):
            holder.append(holder[path[-1]])
        elif what == "more":
            holder[draw(odd_texts)] = draw(values)
        else:
            holder[path[-1]] = draw(values)
    return tree


@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """Draw bytes of which some are another, lack, or stand twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "drop", "insert", "repeat"]))
        if what == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at:]
        elif what == "drop":
            del data[at : at + draw(st.integers(1, 40))]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
        else:
            data[at:at] = bytes(data[at : at + 30]) * draw(st.integers(1, 20))
    return bytes(data)


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


odd_yaml = (
    "!!python/object/apply:os.system [ls]",
    "!!python/name:os.system",
    "!!binary abc",
    "!!binary YWJj",
    "!!set {a, b}",
    "!!timestamp 2001-12-14",
    "!!int x",
    "!x y",
    "2020-01-02",
    "2001-12-14t21:59:43.10-05:00",
    ".inf",
    ".nan",
    "1e999",
    "{<<: 1}",
    "&a [*a]",
    "{? [a] : b}",
    "{a: 1, a: 2}",
    "{1: a}",
    f"{'9' * 5000}",
    f"{'9' * 400}",
    "[",
    "'",
    "\t",
    "*a",
    "&a",
    "\x00",
    "\ud800",
    "\ufeff",
    "null",
    "",
    "[]",
    "a: b",
    "{choices: [2020-01-02]}",
    "{choices: [{a: 1}]}",
    "{low: 1, high: .nan}",
    "{low: 1.0e-5, high: 1.0e-3, log: x}",
    "{low: 1.0e-5, high: 1.0e-3, step: x}",
    "{low: 1.0e-5, high: 1.0e-3, step: .nan}",
    f"{{low: 1, high: {'9' * 400}}}",
)
"""Values of YAML files: tags, dates, and what no reader expects."""
