"""The display of a run, from the events of its steps."""

import io

import pytest
from event_lines import failed, progress
from rich.console import Console

from pipelines import STEP_TITLES
from pipelines.display import PlainDisplay, RunProgress, TerminalDisplay

TRAINING = progress(109, 150, note="loss 0.767, 114 images/s", rate=14.3, eta=3.0)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture
def run(file):
    return RunProgress(file)


def emit(file, *lines):
    with file.open("a") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def test_a_failed_step_keeps_its_first_message_code_and_last_lines(run, file):
    run.begin("download")
    for number in range(40):
        run.add_line(f"line {number}")
    emit(file, failed("bad\n  fix: repair it"), failed("what followed"), '{"event": "failed"', "{")
    run.end("download", 2, stopped=False)
    run.finish()
    assert run.failed is run.steps["download"]
    assert (run.failed.exit_code, run.failed.message) == (2, "bad\n  fix: repair it")
    assert list(run.failed.lines)[-1] == "line 39" and len(run.failed.lines) == 20
    assert run.steps["train"].state == "skipped"


@pytest.mark.parametrize(("code", "stopped"), [(1, True), (143, False)])
def test_a_step_that_ends_because_the_run_was_stopped_has_not_failed(run, capsys, code, stopped):
    with PlainDisplay(run) as display:
        run.begin("train")
        display.refresh_display()
        run.end("train", code, stopped=stopped)
        display.refresh_display()
        run.finish()
    assert capsys.readouterr().out.splitlines() == ["Train ...", "Train: stopped in 0:00"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_shows_every_step_on_a_line(run, file, width):
    run.begin("train")
    emit(file, TRAINING)
    run.read_events()
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = TerminalDisplay(run, console)
    display.refresh_display()
    console.print(display._progress.get_renderable())
    lines = console.file.getvalue().splitlines()
    assert all(title in line for title, line in zip(STEP_TITLES.values(), lines, strict=True))
    assert "0:00" in lines[2] and "train 109/150 steps" in lines[2]
    assert all(len(line) <= width for line in lines)
