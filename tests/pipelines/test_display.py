"""The display of a run, from the runner's lines and the steps' events."""

import io
import json

import pytest
from rich.console import Console

from pipelines import TITLES
from pipelines.display import PlainDisplay, RunProgress, TerminalDisplay

BEGINS = "01:50:54.828 - INFO - Executing task \x1b[96m'{}'\x1b[0m"
ENDS = "01:50:56.418 - {} - Task \x1b[96m'{}'\x1b[0m finished with status \x1b[92m{}\x1b[0m"
TRAINING = {
    "task": "train", "done": 109, "total": 150, "unit": "steps", "note": "loss 0.767, 114 images/s",
    "rate": 14.3, "eta": 3.0, "end": False,
}  # fmt: skip


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def run(events):
    return RunProgress(events)


def tell(events, *items):
    with events.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def step(run, name, *lines, ok=True):
    run.read_line(BEGINS.format(name))
    shown = [run.read_line(f"    {line}") for line in ("01:50:55 kubedet.x: step started", *lines)]
    run.read_line(ENDS.format("INFO" if ok else "ERROR", name, "SUCCESS" if ok else "FAILURE"))
    return [line for line in shown if line is not None]


@pytest.mark.parametrize(("what", "outcome"), [("raw images", ""), ("shards", ", reused")])
def test_found_work_is_said_to_be_reused(run, capsys, what, outcome):
    with PlainDisplay(run) as display:
        step(run, "download", f"12:00:00 data: {what} of x are there already: /d")
        display.tick()
    assert f"Download: done in 0:00{outcome}\n" in capsys.readouterr().out


def test_a_failed_step_keeps_its_message_code_and_last_lines(run, events):
    tell(events, {"step": "download", "message": "bad\n  fix: mend", "exit_code": 2, "known": True})
    step(run, "download", *(f"line {n}" for n in range(40)), ok=False)
    run.finish()
    assert run.failed is run.steps["download"]
    assert (run.failed.exit_code, run.failed.known, run.failed.message) == (2, True, "bad\n  fix: mend")
    assert list(run.failed.lines)[-1] == "line 39" and len(run.failed.lines) == 20
    assert run.steps["train"].state == "skipped"


def test_a_step_that_ends_because_the_run_was_stopped_has_not_failed(run, capsys):
    with PlainDisplay(run) as display:
        run.read_line(BEGINS.format("train"))
        display.tick()
        run.stopping = True
        run.read_line(ENDS.format("ERROR", "train", "FAILURE"))
        display.tick()
        run.finish()
    assert capsys.readouterr().out.splitlines() == ["Train ...", "Train: stopped in 0:00"]


def test_a_silent_step_shows_its_progress_as_lines(run, events, capsys, monkeypatch):
    display = PlainDisplay(run)
    display._last_print -= 12
    display.tick()
    assert capsys.readouterr().out == "starting ...\n", "the runner itself"
    run.read_line(BEGINS.format("train"))
    display.tick()
    tell(events, TRAINING)
    run.read_events()
    display.tick()
    assert capsys.readouterr().out == "Train ...\n"
    display._last_print -= 11
    display.tick()
    assert "train 109/150 steps 73%, 14.3 steps/s, 0:03 left, loss 0.767" in capsys.readouterr().out
    display._last_print -= 12
    display.tick()
    assert capsys.readouterr().out == "  still running, 0:00\n", "no news for ten seconds"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_shows_every_step_on_a_line(run, events, width):
    run.read_line(BEGINS.format("train"))
    tell(events, TRAINING)
    run.read_events()
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = TerminalDisplay(run, console)
    display.tick()
    console.print(display._progress.get_renderable())
    lines = console.file.getvalue().splitlines()
    assert all(title in line for title, line in zip(TITLES.values(), lines, strict=True))
    assert "0:00" in lines[2] and "train 109/150 steps" in lines[2]
    assert all(len(line) <= width for line in lines)
