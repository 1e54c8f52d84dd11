"""The meter's record: when it is written, what is in it, and what a process leaves that was killed."""

import os
import subprocess
import sys
import time

import pytest

from trainer import storage
from trainer.storage import traffic
from trainer.usage import meter as meters
from trainer.usage.energy import Processors
from trainer.usage.meter import Meter
from trainer.usage.record import FORM, Record


def records(folder):
    return [Record.of(storage.read_json(str(path), FORM)) for path in sorted(folder.glob("*.json"))]


def until(happened):
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_record_tells_what_was_used(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in {"name": "package-0", "max_energy_range_uj": "1000000", "energy_uj": "0"}.items():
        (zone / name).write_text(text)
    meter = Meter("prepare", processors=Processors(tmp_path))
    traffic.read(1000)
    traffic.written(10)
    meter.keep(str(tmp_path / "usage"), "run-1", rank=3)
    (zone / "energy_uj").write_text("500000")
    meter.end()
    (record,) = records(tmp_path / "usage")
    assert record.ended and record.seconds >= 0
    assert (record.run, record.step, record.rank, record.nodes) == ("run-1", "prepare", 3, 1)
    assert (record.read, record.written) == (1000, 10)
    assert (record.gpus, record.gpu_joules, record.cpu_joules) == (0, 0.0, 0.5)
    assert traffic.FOLDER not in os.environ


def test_what_is_not_measured_is_none_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "visible_gpus", lambda: None)
    meter = Meter("train", processors=Processors(tmp_path / "none"))
    meter.keep(str(tmp_path), "run-1", processes=2)
    meter.end()
    (record,) = records(tmp_path)
    assert record.gpus is record.gpu_joules is record.cpu_joules is None


def test_a_step_has_as_many_gpus_as_it_has_processes_for(tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "visible_gpus", lambda: ["0", "1", "2"])
    for processes in (0, 2, 5):
        meter = Meter("train")
        meter.keep(str(tmp_path), "run-1", processes=processes)
        assert meter.record().gpus == min(processes, 3)
        meter.end()


def test_a_counter_that_wraps_between_two_records_is_looked_at_often_enough(tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in {"name": "package-0", "max_energy_range_uj": "1000000", "energy_uj": "0"}.items():
        (zone / name).write_text(text)
    processors = Processors(tmp_path)
    meter = Meter("train", every=0.01, processors=processors)
    meter.keep(str(tmp_path / "usage"), "run-1")
    for value in (800_000, 300_000, 900_000):  # 0.8, wraps to 1.3, 1.9
        (zone / "new").write_text(str(value))
        (zone / "new").replace(zone / "energy_uj")
        until(lambda value=value: list(processors._last.values()) == [value])
    meter.end()
    (record,) = records(tmp_path / "usage")
    assert record.cpu_joules == pytest.approx(1.9)


KILLED = """
import sys, time
from trainer.usage.meter import Meter
meter = Meter("prepare", every=0.02)
meter.keep(sys.argv[1], "run-1")
print("kept", flush=True)
time.sleep(600)
"""


def test_a_process_that_was_killed_has_left_its_hours(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"kept\n"
    until(lambda: any(record.seconds > 0.2 for record in records(tmp_path)))
    process.kill()
    process.wait()
    (record,) = records(tmp_path)
    assert not record.ended and record.seconds > 0.2


def test_a_store_that_does_not_take_it_costs_a_warning_and_not_the_work(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    meter = Meter("prepare", every=0.01)
    meter.keep(str(tmp_path / "file"), "run-1")
    until(lambda: caplog.records)
    meter.end()
    assert "what this step uses cannot be kept" in caplog.text
    assert len(caplog.records) == 1


def test_a_node_of_a_training_meters_where_its_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "2")
    with meters.of_node(4):
        assert traffic.FOLDER not in os.environ
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(meters.FOLDER, str(tmp_path / "usage" / "run-7"))
    with pytest.raises(SystemExit), meters.of_node(4):
        traffic.read(7)
        sys.exit(143)
    (record,) = records(tmp_path / "usage" / "run-7")
    assert (record.run, record.step, record.rank, record.read, record.ended) == ("run-7", "train", 2, 7, True)
