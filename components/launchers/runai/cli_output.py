"""Parses what `runai` prints about workloads: its JSON, or its tables where a version has no JSON.

The names of fields differ between versions: the API's (projectName, requestedPods), or column
headers (Running/Req.Pods). Both are compared by letters and digits alone, without case.
Source: NVIDIA Run:ai, API reference, Workloads (fields and phases), and CLI reference.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from components.launchers.backend import JobStatus, Phase, PodStatus
from trainer.errors import LaunchError

_PHASES = {
    Phase.SUSPENDED: ("stopped", "stopping", "suspended", "preempted"),
    Phase.PENDING: (
        "pending", "creating", "initializing", "resuming", "updating", "containercreating", "queued",
        "submitted", "deleting", "unknown", "imagepullbackoff", "errimagepull",
    ),
    Phase.RUNNING: ("running", "degraded"),
    Phase.RESTARTING: ("restarting", "terminating", "error", "crashloopbackoff"),
    Phase.SUCCEEDED: ("succeeded", "completed"),
    Phase.FAILED: ("failed",),
}  # fmt: skip
_POD_PHASES = {
    "Running": ("running",),
    "Succeeded": ("succeeded", "completed"),
    "Failed": ("failed", "error", "oomkilled", "evicted", "containercannotrun"),
}
_PHASE_OF = {word: phase for phase, words in _PHASES.items() for word in words}

_NAME = ("name", "workloadname", "workload", "jobname", "job", "podname", "pod")
_STATE = ("phase", "status", "workloadphase", "actualphase", "podphase", "podstatus", "k8sphase")
_MESSAGE = ("phasemessage", "message", "statusmessage", "reason", "conditionmessage")
_CREATED = ("createdat", "creationtimestamp", "creationtime", "created", "submittedat")
_NODE = ("node", "nodename", "k8snodename")
_COLUMNS = re.compile(r"\S+(?: \S+)*")
_RULE = re.compile(r"[\s─━═+|│┼┬┴├┤┌┐└┘=-]+")
_PAIR = re.compile(r"\s*([A-Za-z][A-Za-z ./_-]*?)\s*:\s+(\S.*?)\s*")
_LABEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*)[=:]\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_RANK = re.compile(r"-(master|worker)-(\d+)$")


@dataclass(frozen=True)
class Listed:
    """A workload as `list` prints it."""

    status: JobStatus
    """Its status, without its pods."""
    running: int | None
    """How many of its pods run, where that is printed."""


@dataclass(frozen=True)
class Workload:
    """A workload as `describe` prints it."""

    status: JobStatus
    """Its status."""
    labels: Mapping[str, str] | None
    """Its labels; None where this version does not print them."""
    framework: str
    """Its framework of distribution, in lower case: pytorch, mpi, ...; empty where it is not printed."""


def workload(text: str, name: str) -> Workload | None:
    """Read the answer of `describe`; None where it describes nothing.

    Raises:
        LaunchError: the answer cannot be read.
    """
    tree = _json(text)
    if tree is None:
        return _described(text, name)
    if isinstance(tree, list):
        tree = tree[0] if tree else {}
    if not isinstance(tree, dict) or not tree:
        return None
    status = _status(tree, name)
    pod_statuses = tuple(_pods([pod for pod in _list(tree, ("pods", "podlist")) if isinstance(pod, dict)]))
    framework = _first(tree, ("distributedframework", "framework"))
    return Workload(replace(status, pods=pod_statuses), _labels(tree), framework.lower())


def workloads(text: str) -> list[Listed]:
    """Read the answer of `list`.

    Raises:
        LaunchError: the answer cannot be read.
    """
    tree = _json(text)
    if tree is None:
        tables = list(_tables(text))
        if not tables and "no " not in text.lower():
            raise _unreadable("list", text)
        rows: list[Any] = [row for _, rows in tables for row in rows]
    else:
        rows = tree if isinstance(tree, list) else _list(tree, ("workloads", "items", "data"))
    return [Listed(_status(row, ""), _count(row)[0]) for row in rows if isinstance(row, dict)]


def _json(text: str) -> Any:
    try:
        tree = json.loads(text) if text else {}
    except ValueError:
        return None
    return [] if tree is None else tree


def _described(text: str, name: str) -> Workload | None:
    """Read `describe` as a table: pairs, and the pods below their own headers."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        if match := _PAIR.fullmatch(line):
            pairs.setdefault(match[1], match[2])
    if not _first(pairs, _STATE):
        raise _unreadable(f"describe {name}", text)
    of_pods = (rows for title, rows in _tables(text) if "pod" in title.lower())
    status = replace(_status(pairs, name), pods=tuple(_pods(next(of_pods, []))))
    label_text = next((value for key, value in pairs.items() if _normalized(key) == "labels"), None)
    labels = None if label_text is None else dict(_LABEL.findall(label_text))
    return Workload(status, labels, _first(pairs, ("distributedframework", "framework")).lower())


def _status(tree: Mapping[str, Any], name: str) -> JobStatus:
    word = _first(tree, _STATE) or "Unknown"
    phase = _PHASE_OF.get(_normalized(word), Phase.PENDING)
    reason = word if _normalized(word) not in (str(phase), "completed") else ""
    return JobStatus(
        name or _first(tree, _NAME), phase, reason=reason, message=_first(tree, _MESSAGE),
        created=_time(_first(tree, _CREATED)), nodes=_count(tree)[1],
    )  # fmt: skip


def _count(tree: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return how many pods run, if that is printed, and how many are requested."""
    both = re.fullmatch(r"(\d+)\s*/\s*(\d+)", _first(tree, ("runningreqpods", "runningrequestedpods")))
    if both:
        return int(both[1]), int(both[2])
    requested = next(_values(tree, ("requestedpods", "podsrequested")), "")
    requested_pods = (
        _first(requested, ("number", "max", "min")) if isinstance(requested, dict) else str(requested)
    )
    running = _first(tree, ("runningpods",))
    return int(running) if running.isdecimal() else None, int(
        requested_pods
    ) if requested_pods.isdecimal() else 1


def _pods(rows: list[dict[str, Any]]) -> Iterator[PodStatus]:
    for index, row in enumerate(rows):
        name = _first(row, _NAME)
        role = _RANK.search(name)
        rank = index if role is None else int(role[2]) + (role[1] == "worker")
        state = _normalized(_first(row, _STATE))
        phase = next((phase for phase, states in _POD_PHASES.items() if state in states), "Pending")
        reason = _first(row, ("reason", "statusreason"))
        if state not in (phase.lower(), "completed"):
            reason = reason or _first(row, _STATE)
        code, restarts = _first(row, ("exitcode",)), _first(row, ("restarts", "restartcount"))
        yield PodStatus(
            name, phase, rank, reason=reason, message=_first(row, ("message", "phasemessage")),
            exit_code=int(code) if code.lstrip("-").isdecimal() else None,
            restarts=int(restarts) if restarts.isdecimal() else 0, node=_first(row, _NODE),
            created=_time(_first(row, _CREATED)),
        )  # fmt: skip


def _labels(tree: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the labels of an answer in JSON: a mapping, pairs, or one text."""
    labels = next(_values(tree, ("labels",)), None)
    if isinstance(labels, dict):
        return {str(key): str(value) for key, value in labels.items()}
    if isinstance(labels, list):
        pairs = {}
        for item in labels:
            if isinstance(item, dict):
                pairs[_first(item, ("name", "key"))] = _first(item, ("value",))
            else:
                pairs.update(_LABEL.findall(str(item)))
        return pairs
    return dict(_LABEL.findall(labels)) if isinstance(labels, str) else None


def _values(tree: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    """Yield what stands under these names: first those of the first name, outer before inner."""
    for name in names:
        level: list[Mapping[str, Any]] = [tree]
        while level:
            yield from (value for node in level for key, value in node.items() if _normalized(key) == name)
            level = [value for node in level for value in node.values() if isinstance(value, dict)]


def _list(tree: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    return next((value for value in _values(tree, names) if isinstance(value, list)), [])


def _first(tree: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first of these that is a text or number, as text."""
    for value in _values(tree, names):
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip(" -"):
            return str(value).strip()
    return ""


def _normalized(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", str(key).lower())


def _time(text: str) -> str:
    """Return a time as RFC 3339, nothing for what is none (an age, say)."""
    return text if re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d", text) else ""


def _tables(text: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the tables of a text that have a name and a state: a title, and rows by column header.

    The title is the line before the headers, and the headers. A cell belongs to the header above it:
    one may be empty, or not begin where its header does.
    """
    title = before = ""
    heads: list[re.Match[str]] = []
    rows: list[dict[str, str]] = []
    for line in [*text.splitlines(), ""]:
        if line.strip() and _RULE.fullmatch(line):
            continue
        cells = list(_COLUMNS.finditer(re.sub("[│|]", " ", line)))
        plain = [_normalized(cell[0]) for cell in cells]
        if any(key in _NAME for key in plain) and any(key in _STATE for key in plain):
            title, heads, rows = f"{before} {line}", cells, []
        elif heads and len(cells) > 1:
            rows.append({min(heads, key=lambda head: _distance(head, cell))[0]: cell[0] for cell in cells})
        elif heads:
            yield title, rows
            heads = []
        before = line if cells else before


def _distance(head: re.Match[str], cell: re.Match[str]) -> tuple[int, int]:
    """Return the horizontal distance of a cell from a header; negative is how much they overlap."""
    gap = max(head.start(), cell.start()) - min(head.end(), cell.end())
    return max(gap, 0) or min(gap, 0), abs(head.start() - cell.start())


def _unreadable(verb: str, text: str) -> LaunchError:
    shown = "\n".join(text.splitlines()[:5])
    return LaunchError(
        f"the answer of `runai ... {verb}` cannot be read:\n{shown}",
        fix="install a newer command line of Run:ai; kubedet reads its JSON",
    )
