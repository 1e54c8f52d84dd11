"""metrics.jsonl: the rows of a run."""

import pytest

from trainer.trackers.training_log import METRICS, TrainingLog, read_rows

ROWS = [{"step": step, "loss": 1.5 / step, "lr": 0.1} for step in range(1, 6)]


@pytest.fixture
def written(tmp_path):
    log = TrainingLog(str(tmp_path), 0)
    for row in ROWS:
        log.add("train", row)
    log.close()
    return tmp_path / METRICS


DAMAGED = [
    b'{"kind": "tr\x00in", "step": 2}\n',
    b'{"kind": "trai~", "step": 2, "loss": 0.5}\n',
    b'{"kind": ["val"], "step": 2}\n',
    b'{"kind": "train", "step": "2"}\n',
    b'{"kind": "train", "step": null}\n',
    b'{"kind": "train", "ste0": 2}\n',
    b'{"kind": "train", "step": 2, "loss": "0.5"}\n',
    b'"kind step"\n',
    b"[" * 100_000 + b"\n",
    b"\xff\n",
]


@pytest.mark.parametrize("row", DAMAGED)
def test_a_run_resumes_without_its_damaged_rows(written, row, caplog):
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([lines[0], row, *lines[2:]]))
    TrainingLog(str(written.parent), 4).close()
    assert "1 of 5 rows are damaged" in caplog.text
    assert [row["step"] for row in read_rows(str(written.parent))] == [1, 3, 4]


def test_a_truncated_last_row_is_no_damage(written, caplog):
    written.write_bytes(written.read_bytes()[:-20])
    assert [row["step"] for row in read_rows(str(written.parent))] == [1, 2, 3, 4]
    assert not caplog.text
