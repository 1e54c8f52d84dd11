"""The steps of a local run as processes."""

import signal

import pytest

from pipelines import display
from pipelines.local import LocalRun


@pytest.mark.slow
def test_a_signal_while_a_step_is_started_stops_it(tmp_path, monkeypatch):
    progress = display.RunProgress(tmp_path / "events.jsonl")
    begin = progress.begin

    def begin_late(name):
        begin(name)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress, "begin", begin_late)
    request = {"source": "sample:images=5000", "data_root": str(tmp_path / "root"), "recipe": "debug"}
    request |= {"overrides": {}, "min_new_images": 0}
    shown = display.PlainDisplay(progress)
    with (
        (tmp_path / "lock").open("w") as lock,
        LocalRun(tmp_path, progress, shown, tmp_path, lock) as run,
    ):
        assert run.run(request).raw is None
    assert progress.steps["download"].state == "stopped"
    assert not (tmp_path / "root" / "raw").exists()
