"""The faults that `make faults` injects, what is promised of each, and the table of its results."""

import os
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

STAGES = ("download", "shard", "train", "evaluate", "export", "serve")

FAULTS = {
    "kill": (
        "killed (SIGKILL) repeatedly at random points",
        "the same command continues, and its result equals an uninterrupted run's",
    ),
    "stop": ("SIGTERM", "saves its state and exits; training resumes bit for bit"),
    "worker": (
        "a worker process killed",
        "the command fails with a message; unfinished data never looks complete",
    ),
    "flip": (
        "one bit flipped in a written file",
        "detected by the hash; the message names the file, and the same command rewrites it",
    ),
    "cut": ("a file truncated", "as above"),
    "lost": ("a file deleted", "as above; best.pt from the checkpoint of its step"),
    "best": (
        "best.pt lost, without a checkpoint of its step",
        "reported; the next validation selects the best weights again",
    ),
    "every": (
        "every checkpoint of a run corrupt",
        "reported; the run does not restart from scratch by itself",
    ),
    "form": (
        "JSON files with an unexpected structure",
        "the message names the key; the same command rewrites the file",
    ),
    "newer": ("a file of a newer version", "refused with both versions, and not changed"),
    "image": ("a raw image lost or altered", "fetched again if the source is unchanged, otherwise an error"),
    "swallow": ("PUT acknowledged, but nothing stored", "detected by reading back, and written again"),
    "alter": ("PUT acknowledged, but another byte stored", "detected by reading back, and written again"),
    "busy": ("503 SlowDown", "retried; the result is the same"),
    "reset": ("connections reset, before and after the request took effect", "as above"),
    "short": ("responses truncated or altered in transit", "as above"),
    "stall": ("responses that stall", "as above"),
    "away": ("a store that fails and recovers", "as above"),
    "dead": ("a store that stays unreachable", "an error about the store, not the data; no partial files"),
    "missing": ("images that the source does not have (404)", "counted and listed, up to `max_bad_fraction`"),
    "back": ("such an image becomes available", "the next run fetches it"),
    "redirect": ("a redirect to an internal address", "refused at each hop, nothing is stored"),
    "internal": ("an internal address in annotations", "refused until it is allowed by name"),
    "other": ("bytes that are not an image, at an image's address", "not stored"),
    "full": ("a full disk", "an error that says so; no partial files; continues when there is room"),
    "memory": ("lack of memory", "reported as such, never as corruption; no data is left out"),
    "files": ("too many open files", "as above"),
    "moved": (
        "a data root moved or copied, between paths and a store",
        "used as it is; nothing is fetched again",
    ),
    "swap": ("an old or different model in a version's folder", "refused by name, version and digest"),
    "added": ("a file added to a bundle", "refused by `model verify`"),
    "bomb": ("an image of 169 million pixels in a few kilobytes", "refused by its header, before decoding"),
    "silent": ("idle connections", "closed after a timeout; others are answered"),
}
"""By key: what happens, and what is promised then."""

Results = dict[tuple[str, str], list[tuple[str, int]]]
"""By fault and stage: outcome of each test, and how many faults it injected."""


def cells(fault: str, *stages: str) -> pytest.MarkDecorator:
    """Mark a test as one of a fault at some stages."""
    assert fault in FAULTS and stages and set(stages) <= set(STAGES)
    return pytest.mark.faults(fault, stages)


def each(*faults: str, stages: tuple[str, ...]) -> list:
    return [pytest.param(fault, marks=cells(fault, *stages)) for fault in faults]


def table(results: Results) -> str:
    """Return the results as a table in Markdown: of each cell how many faults were injected, and held."""
    lines = [f"| fault | promise | {' | '.join(STAGES)} |", "| --- " * (2 + len(STAGES)) + "|"]
    for fault, (happens, promise) in FAULTS.items():
        row = [_cell(results.get((fault, stage), [])) for stage in STAGES]
        lines.append(f"| {happens} | {promise} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _cell(outcomes: Iterable[tuple[str, int]]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for outcome, injected in outcomes:
        counts[outcome] += injected
    if counts["failed"]:
        return f"**{counts['failed']} of {sum(counts.values())} failed**"
    return str(counts["passed"]) if counts["passed"] else "not run" if counts["skipped"] else ""


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def lose(path: Path, chance: random.Random) -> None:
    path.unlink()


HARMS = {"flip": flip, "cut": cut, "lost": lose}


def contents(*folders: Path) -> dict[str, bytes]:
    """Return the bytes of all files below folders by their names, those of unfinished writers left out."""
    return {
        f"{folder.name}/{path.relative_to(folder)}": path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
