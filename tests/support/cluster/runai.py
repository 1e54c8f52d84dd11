"""A program `runai` for the PATH: it records its calls and answers as the CLI reference says.

Its state is in files of its folder, which tests read and change: `calls` has the arguments of each call on
a line, as JSON; `NAME.json` is a workload as `describe --output json` prints it, with its kind, its lines
and its next phases; `modes` names its faults.
"""

import json
import os
import sys
import threading
from pathlib import Path

from patience import until

PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from cluster import runai
from pathlib import Path
sys.exit(runai.main(Path(__file__).parent, sys.argv[1:]))
"""


class RunaiProgram:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "runai"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.set_modes()

    def set_modes(self, *modes: str) -> None:
        """Choose its faults: stranger (not logged in), old (CLI v1), no labels."""
        (self.folder / "modes").write_text(json.dumps(modes))

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """The kind and verb of each call that changed something."""
        return [" ".join(call[1:3]) for call in self.calls if call[2] in ("submit", "delete")]

    def workload(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text())

    def change(self, name: str, **fields: object) -> None:
        path = self.folder / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else made(name, "standard", {})
        path.write_text(json.dumps(before | fields))

    def change_later(self, name: str, after: int = 2, **fields: object) -> None:
        """Change a workload when it was described `after` more times."""
        described = sum("describe" in call for call in self.calls)

        def act() -> None:
            until(lambda: sum("describe" in call for call in self.calls) > described + after, 120)
            self.change(name, **fields)

        threading.Thread(target=act, daemon=True).start()


def made(name: str, kind: str, options: dict) -> dict:
    nodes = int(options.get("--workers", ["0"])[0]) + 1
    pods = [f"{name}-master-0", *(f"{name}-worker-{i}" for i in range(nodes - 1))]
    if kind == "standard":
        pods = [f"{name}-0-0"]
    return {
        "kind": kind,
        "name": name,
        "phase": "Running",
        "phaseMessage": "",
        "projectName": options.get("--project", ["default"])[0],
        "labels": dict(label.split("=", 1) for label in options.get("--label", [])),
        "createdAt": "2026-11-22T09:00:00Z",
        "requestedPods": {"number": nodes},
        "pods": [{"name": pod, "status": "Running", "node": f"gpu-{i}"} for i, pod in enumerate(pods)],
        "lines": {pod: [f"2026-11-22T09:00:0{i}.5Z hello from {pod}"] for i, pod in enumerate(pods)},
        "phases": [],
    }


def main(folder: Path, words: list[str]) -> int:
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    modes = json.loads((folder / "modes").read_text())
    if "stranger" in modes:
        return _fail("Error: you are not logged in, please run 'runai login'")
    if "old" in modes:
        return _fail(f'Error: unknown command "{words[0]}" for "runai"')
    if words[:2] == ["training", "list"]:
        names = [path.stem for path in folder.glob("*.json")]
        print(json.dumps(names) if "--json" in words else "\n".join(["Workload", *names]))
        return 0
    _, kind, verb, name, *rest = words
    options, command = _parsed(rest)
    path = folder / f"{name}.json"
    if verb == "submit":
        path.write_text(json.dumps(made(name, kind, options) | {"command": command}))
        return 0
    item = json.loads(path.read_text()) if path.exists() else {}
    if item.get("kind") != kind:
        return _fail(f"Error: workload {name} was not found in project")
    if verb == "delete":
        path.unlink()
    elif verb == "exec":
        os.execvp(command[0], command)
    elif verb == "logs":
        return _logs(item, options)
    else:
        if item["phases"]:
            item["phase"], *item["phases"] = item["phases"]
            path.write_text(json.dumps(item))
        hidden = ("lines", "phases", "command", "kind", *(["labels"] if "no labels" in modes else []))
        print(json.dumps({key: value for key, value in item.items() if key not in hidden}))
    return 0


def _parsed(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, and the command after `--`."""
    cut = words.index("--") if "--" in words else len(words)
    options: dict[str, list[str]] = {}
    for index, word in enumerate(words[:cut]):
        if word.startswith("--"):
            options.setdefault(word, []).append(words[index + 1] if index + 1 < cut else "")
    return options, words[cut + 1 :]


def _logs(item: dict, options: dict) -> int:
    if item["phase"] == "Pending":
        return _fail("Error: workload is not ready to stream: pod is not ready")
    since = options.get("--since-time", [""])[0].rstrip("Z")
    for line in item["lines"].get(options["--pod"][0], []):
        if line.split(" ", 1)[0] >= since:
            print(line)
    return 0


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1
