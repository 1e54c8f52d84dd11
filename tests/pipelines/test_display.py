"""The display of a run, from the events of its steps."""

import io

import pytest
from event_lines import failed, progress
from rich.console import Console

from pipelines import TITLES
from pipelines.display import PlainDisplay, RunProgress, TerminalDisplay
from trainer.base import events

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


@pytest.mark.parametrize(("reused", "outcome"), [(False, ""), (True, ", reused")])
def test_found_work_is_said_to_be_reused(run, file, capsys, reused, outcome):
    with PlainDisplay(run) as display:
        run.begin("download")
        if reused:
            emit(file, events.encode(events.Reused(uri="/d")).rstrip())
        run.end("download", 0, stopped=False)
        display.tick()
    assert f"Download: done in 0:00{outcome}\n" in capsys.readouterr().out


def test_a_step_is_counted_by_its_first_task(run, file, capsys):
    steps = events.Progress(task="train", done=12, total=12, unit="steps", end=True)
    images = events.Progress(task="evaluate", done=8, total=8, unit="images", end=True)
    with PlainDisplay(run) as display:
        run.begin("train")
        emit(file, events.encode(steps).rstrip(), events.encode(images).rstrip())
        run.end("train", 0, stopped=False)
        display.tick()
    assert "Train: done in 0:00, 12 steps\n" in capsys.readouterr().out


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
        display.tick()
        run.end("train", code, stopped=stopped)
        display.tick()
        run.finish()
    assert capsys.readouterr().out.splitlines() == ["Train ...", "Train: stopped in 0:00"]


def test_a_silent_step_shows_its_progress_as_lines(run, file, capsys):
    display = PlainDisplay(run)
    run.begin("train")
    display.tick()
    emit(file, TRAINING)
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
def test_a_terminal_shows_every_step_on_a_line(run, file, width):
    run.begin("train")
    emit(file, TRAINING)
    run.read_events()
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = TerminalDisplay(run, console)
    display.tick()
    console.print(display._progress.get_renderable())
    lines = console.file.getvalue().splitlines()
    assert all(title in line for title, line in zip(TITLES.values(), lines, strict=True))
    assert "0:00" in lines[2] and "train 109/150 steps" in lines[2]
    assert all(len(line) <= width for line in lines)
