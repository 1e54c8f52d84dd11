"""Sums by step, with prices: unknown parts make a sum a lower bound; files of prices and their mistakes."""

import pytest

from operations import costs
from operations.costs import Prices
from trainer.base.errors import ConfigError, StorageError
from trainer.launching.usage import Record

HOUR = 3600.0


def record(step, began, **fields):
    known = {
        "run": "r", "rank": 0, "ended": True, "seconds": HOUR, "nodes": 1, "gpus": 0, "read": 0, "written": 0
    }  # fmt: skip
    return Record(step=step, began=f"2026-11-23T0{began}:00:00+00:00", **(known | fields))


def test_a_step_is_the_sum_of_its_tries_parts_and_nodes():
    summed = costs.summed(
        [
            record("train", 3, rank=1, gpus=8, seconds=2 * HOUR),
            record("train", 2, ended=False, gpus=8, seconds=2 * HOUR),
            record("train", 2, nodes=0, seconds=9 * HOUR),  # waits for the two
            record("prepare", 1, read=3_000_000_000, written=500_000_000),
        ]
    )
    prepare, train = summed.steps
    assert (prepare.step, train.step, summed.total.step) == ("prepare", "train", "in all")
    assert (train.tries, train.node_hours, train.gpu_hours.value) == (3, 4.0, 32.0)
    assert summed.total.node_hours == 5.0 and summed.total.money is None
    assert (summed.total.read, summed.total.written) == (3_000_000_000, 500_000_000)
    assert [len(row) for row in summed.table()] == [5] * 4


def test_money_follows_from_the_prices():
    prices = Prices("EUR", node_hour=1.0, gpu_hour=2.0, gb_read=0.1, gb_written=0.2)
    used = [record("train", 1, gpus=2, read=10**9, written=2 * 10**9)]
    total = costs.summed(used, prices).total
    assert total.money is not None and total.money.value == pytest.approx(1 + 4 + 0.1 + 0.4)
    header, row, _ = costs.summed(used, prices).table()
    assert header[-1] == "EUR" and row[-1] == "5.50"


def test_unknown_numbers_of_gpus_make_sums_and_money_a_lower_bound():
    used = [record("train", 1, gpus=None), record("export", 2, gpus=2)]
    summed = costs.summed(used, Prices(node_hour=1.0, gpu_hour=2.0))
    assert [row[2] for row in summed.table()] == ["GPU h", "-", "2.000", ">=2.000"]
    assert [row[-1] for row in summed.table()][1:] == [">=1.00", "5.00", ">=6.00"]
    assert summed.fields()["total"]["gpu_hours"] == {"value": 2.0, "incomplete": True}
    money = costs.summed(used, Prices(node_hour=1.0)).total.money
    assert money is not None and money.shown(2) == "2.00"


def test_what_is_named_is_read_and_the_rest_costs_nothing(tmp_path):
    (tmp_path / "p.yaml").write_text("currency: EUR\nnode_hour: 0.5\ngpu_hour: 2\n")
    read = costs.read_prices(str(tmp_path / "p.yaml"))
    assert read == Prices(currency="EUR", node_hour=0.5, gpu_hour=2.0) and read.has_money
    (tmp_path / "p.json").write_text('{"currency": "EUR"}')
    assert not costs.read_prices(str(tmp_path / "p.json")).has_money


def test_the_variable_goes_before_the_data_roots_own(tmp_path, monkeypatch):
    monkeypatch.delenv(costs.VARIABLE, raising=False)
    assert costs.find_prices(str(tmp_path)) is None
    (tmp_path / "prices.yaml").write_text("gb_read: 0.3")
    assert costs.find_prices(str(tmp_path)) == Prices(gb_read=0.3)
    (tmp_path / "other.yaml").write_text("gb_read: 0.4")
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "other.yaml"))
    assert costs.find_prices(str(tmp_path)) == Prices(gb_read=0.4)
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "none.yaml"))
    with pytest.raises(StorageError, match=r"none\.yaml"):
        costs.find_prices(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu_hours: 2", "gpu_hours"),
        ("gpu_hour: -1", "gpu_hour"),
        ("gpu_hour: .inf", "gpu_hour"),
        ("gpu_hour: cheap", "gpu_hour"),
        ("- 1", "not an object"),
        ("gpu_hour: {", "cannot be used"),
        ("[" * 300, "cannot be used"),
    ],
)
def test_what_is_no_price_is_named_with_what_may_stand_there(tmp_path, text, said):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        costs.read_prices(str(tmp_path / "p.yaml"))
    assert "gb_written" in caught.value.fix
