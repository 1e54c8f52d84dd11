"""The meter's record: when it is written, what is in it, and what a process leaves that was killed."""

import os
import sys

import pytest
from patience import until

from trainer import storage
from trainer.base import traffic
from trainer.launching import usage
from trainer.launching.usage import FORM, Meter, Record, visible_gpus


def records(folder):
    return [Record.of(storage.read_json(str(path), FORM)) for path in sorted(folder.glob("*.json"))]


def test_a_record_tells_what_was_used(tmp_path):
    meter = Meter("prepare")
    traffic.read(1000)
    traffic.written(10)
    meter.keep(str(tmp_path / "usage"), "run-1", rank=3)
    meter.end()
    (record,) = records(tmp_path / "usage")
    assert record.ended and record.seconds >= 0
    assert (record.run, record.step, record.rank, record.nodes) == ("run-1", "prepare", 3, 1)
    assert (record.read, record.written) == (1000, 10)
    assert record.gpus == 0
    assert traffic.FOLDER not in os.environ


@pytest.mark.parametrize(("processes", "visible", "gpus"), [(0, 3, 0), (2, 3, 2), (5, 3, 3), (2, None, None)])
def test_each_process_uses_a_gpu(processes, visible, gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "visible_gpus", lambda: visible and ["0"] * visible)
    meter = Meter("train")
    meter.keep(str(tmp_path), "run-1", processes=processes)
    meter.end()
    (record,) = records(tmp_path)
    assert record.gpus == gpus


@pytest.mark.parametrize(
    ("chosen", "names"),
    [(None, ["0", "1"]), ("1", ["1"]), ("", []), ("-1,0", []), ("0,5,1", ["0"]), ("GPU-abc", ["GPU-abc"])],
)
def test_the_gpus_of_a_process_are_those_that_cuda_sees(tmp_path, chosen, names):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path, {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == names


def test_a_store_that_does_not_take_it_costs_a_warning_and_not_the_work(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    meter = Meter("prepare", every=0.01)
    meter.keep(str(tmp_path / "file"), "run-1")
    until(lambda: caplog.records)
    meter.end()
    assert "the usage of this step cannot be written" in caplog.text
    assert len(caplog.records) == 1


def test_a_node_of_a_training_meters_where_its_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "2")
    with usage.of_node(4):
        assert traffic.FOLDER not in os.environ
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(usage.FOLDER, str(tmp_path / "usage" / "run-7"))
    with pytest.raises(SystemExit), usage.of_node(4):
        traffic.read(7)
        sys.exit(143)
    (record,) = records(tmp_path / "usage" / "run-7")
    assert (record.run, record.step, record.rank, record.read, record.ended) == ("run-7", "train", 2, 7, True)
