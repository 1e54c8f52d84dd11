"""metrics.jsonl: each row is read as it was written, or left out and told of."""

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


def test_every_flipped_bit_costs_its_row_alone(written, caplog):
    expected = [{"kind": "train", **row} for row in ROWS]
    folder, data = str(written.parent), written.read_bytes()
    assert read_rows(folder) == expected and not caplog.text
    begin = data.index(b"\n") + 1
    end = data.index(b"\n", begin)
    for place in range(begin, end):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 7)
        written.write_bytes(damaged)
        assert read_rows(folder) == expected[:1] + expected[2:], place
    assert f"{written}: skipped 1 of 5 rows, which are damaged" in caplog.text


def test_a_truncated_last_row_is_no_damage(written, caplog):
    written.write_bytes(written.read_bytes()[:-20])
    assert len(read_rows(str(written.parent))) == 4 and not caplog.text


def test_a_run_resumes_without_its_damaged_rows(written):
    first, second, *rest = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([first, second.replace(b"0.75", b"0.25"), b"[" * 100_000 + b"\n", *rest]))
    TrainingLog(str(written.parent), 4).close()
    assert [row["step"] for row in read_rows(str(written.parent))] == [1, 3, 4]
