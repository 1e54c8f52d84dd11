"""A program `runai` for the PATH: it writes down how it is called and answers as the CLI reference says.

What it knows of workloads lies in files, so that tests can look at it and change it:
`calls` has the words of each call on a line, as JSON; `NAME.json` a workload, as `describe -o json`
prints it, with its kind, lines and the phases it goes through besides; `modes` what is wrong with it.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from patience import until

PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import fake_runai
from pathlib import Path
sys.exit(fake_runai.main(Path(__file__).parent, sys.argv[1:]))
"""


class FakeRunai:
    """The program and its memory, for a test.

    Args:
        folder: an empty one; to be put on the PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "runai"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.set_modes()

    def set_modes(self, *modes: str) -> None:
        """Choose what is wrong: tables (no JSON), stranger (not logged in), old (CLI v1), silent labels."""
        (self.folder / "modes").write_text(json.dumps(modes))

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """The kind and verb of each call that changed something."""
        return [" ".join(call[1:3]) for call in self.calls if call[2] in ("submit", "delete")]

    def workload(self, name: str) -> dict:
        """What is known of a workload."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def change_later(self, name: str, asked: int = 2, **fields: object) -> threading.Thread:
        """Change a workload once it was described so often from now on; before that it is as it was."""
        before = self._descriptions()

        def act() -> None:
            until(lambda: self._descriptions() > before + asked, 120)  # The next begins: these have ended.
            self.change(name, **fields)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        return thread

    def _descriptions(self) -> int:
        return sum(call[1:2] != ["whoami"] and "describe" in call for call in self.calls)

    def change(self, name: str, **fields: object) -> None:
        """Change a workload, or make one."""
        path = self.folder / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else made(name, "standard", {})
        path.write_text(json.dumps(before | fields))


def made(name: str, kind: str, options: dict) -> dict:
    """A workload that was just submitted."""
    nodes = int(options.get("--workers", ["0"])[0]) + 1
    pods = [f"{name}-master-0", *(f"{name}-worker-{i}" for i in range(nodes - 1))]
    if kind == "standard":
        pods = [f"{name}-0-0"]
    return {
        "kind": kind, "name": name, "type": "Training", "phase": "Running", "phaseMessage": "",
        "projectName": options.get("--project", ["default"])[0],
        "labels": dict(label.split("=", 1) for label in options.get("--label", [])),
        "distributedFramework": "Pytorch" if kind == "pytorch" else "",
        "createdAt": "2026-11-22T09:00:00Z", "requestedPods": {"number": nodes}, "runningPods": nodes,
        "pods": [{"name": pod, "status": "Running", "node": f"gpu-{i}"} for i, pod in enumerate(pods)],
        "lines": {pod: [f"2026-11-22T09:00:0{i}.5Z hello from {pod}"] for i, pod in enumerate(pods)},
        "phases": [], "broken_after": 0,
    }  # fmt: skip


def main(folder: Path, words: list[str]) -> int:
    """Do one call."""
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    modes = json.loads((folder / "modes").read_text())
    if "stranger" in modes:
        return _fail("Error: you are not logged in, please run 'runai login'")
    if "old" in modes or words[0] != "training" or words[1] not in ("standard", "pytorch"):
        return _fail(f'Error: unknown command "{words[0]}" for "runai"')
    _, kind, verb, *rest = words
    options, names, command = _parsed(rest)
    if "tables" in modes and ({"--json", "--output"} & set(options)):
        return _fail(f"Error: unknown flag: {(set(options) & {'--json', '--output'}).pop()}")
    if verb == "list":
        return _list(folder, kind, json_wanted="--json" in options)
    path = folder / f"{names[0]}.json"
    if verb == "submit":
        if path.exists():
            return _fail(f"Error: workload {names[0]} already exists")
        path.write_text(json.dumps(made(names[0], kind, options) | {"command": command}))
        print(f"Creating {kind} training {names[0]}...")
        return 0
    if not path.exists() or json.loads(path.read_text())["kind"] != kind:
        return _fail(f"Error: workload {names[0]} was not found in project")
    return {"describe": _describe, "logs": _logs, "exec": _exec, "delete": _delete}[verb](
        path, options, command, modes
    )


def _parsed(words: list[str]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """Options with their values, names, and the command behind `--`."""
    switches = {"--json", "--follow", "--timestamps", "--stdin", "--tty", "--command", "--large-shm",
                "--run-as-non-root"}  # fmt: skip
    cut = words.index("--") if "--" in words else len(words)
    options: dict[str, list[str]] = {}
    names, arguments = [], iter(words[:cut])
    for word in arguments:
        if word.startswith("--"):
            options.setdefault(word, []).append("" if word in switches else next(arguments))
        else:
            names.append(word)
    return options, names, words[cut + 1 :]


def _list(folder: Path, kind: str, *, json_wanted: bool) -> int:
    workloads = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    workloads = [item for item in workloads if item["kind"] == kind]
    if json_wanted:
        print(json.dumps(workloads))
    elif not workloads:
        print("No workloads found")
    else:
        print("Workload      Type      Status     Project  Running/Req.Pods  GPU Alloc.")
        print("─" * 80)
        for item in workloads:
            pods = f"{item['runningPods']}/{item['requestedPods']['number']}"
            print(
                f"{item['name']:<14}{item['type']:<10}{item['phase']:<11}{'team':<9}{pods:^16}  {'1.00':^10}"
            )
    return 0


def _describe(path: Path, options: dict, command: list[str], modes: list[str]) -> int:
    item = json.loads(path.read_text())
    if item["phases"]:
        item["phase"], *item["phases"] = item["phases"]
        path.write_text(json.dumps(item))
    if "--output" in options:
        shown = {
            key: value for key, value in item.items() if key not in ("lines", "phases", "command", "kind")
        }
        if "silent labels" in modes:
            del shown["labels"]
        print(json.dumps(shown))
        return 0
    labels = ",".join(f"{key}={value}" for key, value in item["labels"].items())
    print(f"Name:               {item['name']}\nPhase:              {item['phase']}")
    print(f"Labels:             {labels}\nCreation Time:      {item['createdAt']}\n\nPods")
    print(" Pod                     Status     Node     Completed At\n " + "─" * 60)
    for pod in item["pods"]:
        print(f" {pod['name']:<24}{pod['status']:<11}{pod['node']:<9}")
    print("\nEvents\n Type    Reason   Message\n ───────────\n Normal  Pulled   image:1 pulled")
    return 0


def _logs(path: Path, options: dict, command: list[str], modes: list[str]) -> int:
    item = json.loads(path.read_text())
    if item["phase"] == "Pending":
        return _fail("Error: workload is not ready to stream: pod is not ready")
    pod = options.get("--pod", [item["pods"][0]["name"]])[0]
    since = options.get("--since-time", [""])[0].rstrip("Z")
    lines = [line for line in item["lines"].get(pod, []) if line.split(" ", 1)[0] >= since]
    if cut := item["broken_after"]:  # The first stream ends early, with an error.
        path.write_text(json.dumps(item | {"broken_after": 0}))
    for line in lines[: cut or len(lines)][-int(options.get("--tail", ["100000"])[0]) :]:
        print(line if "--timestamps" in options else line.split(" ", 1)[1], flush=True)
    if cut:
        return _fail("Error: stream closed: unexpected EOF")
    end = time.monotonic() + 60
    while "--follow" in options and time.monotonic() < end and path.exists():
        if json.loads(path.read_text())["phase"] != "Running":
            break
        time.sleep(0.02)
    return 0


def _exec(path: Path, options: dict, command: list[str], modes: list[str]) -> int:
    os.execvp(command[0], command)


def _delete(path: Path, options: dict, command: list[str], modes: list[str]) -> int:
    path.unlink()
    print("Workload deleted successfully")
    return 0


def _fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1
