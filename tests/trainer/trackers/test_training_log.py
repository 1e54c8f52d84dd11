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


def test_unreadable_rows_are_left_out(written):
    first, second, *rest = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([first, b"[1]\n\xff" + second, *rest])[:-20])
    assert [row["step"] for row in read_rows(str(written.parent))] == [1, 3, 4]
