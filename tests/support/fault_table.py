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
        "killed (SIGKILL) at random points, again and again",
        "the same command goes on, and its result is that of one that nobody killed",
    ),
    "stop": ("SIGTERM", "ends by itself, its state saved; training resumes to the same bits"),
    "worker": (
        "a worker process killed",
        "the command ends, and says so; nothing unfinished is taken for whole",
    ),
    "flip": (
        "one bit flipped in a file that was written",
        "never believed: the file is named by its hash, and the same command writes it anew",
    ),
    "cut": ("a file cut off in its middle", "as above"),
    "lost": ("a file deleted", "as above; best.pt from the checkpoint of its step"),
    "best": (
        "best.pt lost, and no checkpoint of its step left",
        "said; the next validation chooses the best anew",
    ),
    "every": ("every checkpoint of a run damaged", "said; the run does not begin anew by itself"),
    "form": ("JSON of ours of another shape", "named with its key; the same command writes it anew"),
    "newer": ("a file of a newer version", "refused with both versions, and left as it is"),
    "image": (
        "a raw image lost or altered",
        "fetched again from the source, if it is the same there; else an error that says so",
    ),
    "swallow": ("PUT acknowledged, nothing kept", "read back, and written again"),
    "alter": ("PUT acknowledged, another byte kept", "read back, and written again"),
    "busy": ("503 SlowDown", "tried again; the result is the same"),
    "reset": ("connections reset, before and after the work was done", "as above"),
    "short": ("answers cut off or altered on their way", "as above"),
    "stall": ("answers that stop coming", "as above"),
    "away": ("a store that dies and comes back", "as above"),
    "dead": ("a store that stays away", "an error that is none of the data; nothing is left half-written"),
    "missing": ("images that the source does not have (404)", "counted and named, up to `max_bad_fraction`"),
    "back": ("such an image is there later", "the next run asks for it"),
    "redirect": ("a redirect to an internal address", "refused at each hop, nothing is kept"),
    "internal": ("an internal address in annotations", "refused until it is allowed by name"),
    "other": ("bytes that are no image, under an image's address", "not kept"),
    "full": (
        "a full disk",
        "an error that says so; nothing half-written has its name; goes on when there is room",
    ),
    "memory": ("want of memory", "told as such, never as damage; nothing is left out of the data for it"),
    "files": ("too many open files", "as above"),
    "moved": (
        "a data root moved or copied, between paths and a store",
        "used as it is; nothing is fetched again",
    ),
    "swap": ("an old or another model in a version's folder", "refused by name, version and digest"),
    "added": ("a file added to a bundle", "refused by `model verify`"),
    "bomb": ("an image of 169 million pixels in some kilobytes", "refused by its header, undecoded"),
    "silent": ("connections that say nothing", "closed after their time; others are answered"),
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
