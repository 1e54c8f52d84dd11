"""Sums by step, with prices: what is unknown, estimated or measured stays told apart."""

import pytest

from components import costs
from components.costs import Figure
from components.prices import Prices
from trainer.usage.record import Record

HOUR, KWH = 3600.0, 3.6e6


def record(step, began, **fields):
    known = {
        "run": "r", "rank": 0, "ended": True, "seconds": HOUR, "nodes": 1, "gpus": 0, "gpu_joules": 0.0,
        "cpu_joules": 0.1 * KWH, "read": 0, "written": 0,
    }  # fmt: skip
    return Record(step=step, began=f"2026-11-23T0{began}:00:00+00:00", **(known | fields))


def test_a_step_is_the_sum_of_its_tries_parts_and_nodes():
    gpus = {"gpus": 8, "gpu_joules": 4 * KWH, "seconds": 2 * HOUR}
    summed = costs.summed(
        [
            record("train", 3, rank=1, **gpus),
            record("train", 2, ended=False, **gpus),
            record("train", 2, nodes=0, cpu_joules=None, seconds=9 * HOUR),  # waits for the two
            record("prepare", 1, read=3_000_000_000, written=500_000_000),
        ]
    )
    prepare, train = summed.steps
    assert (prepare.step, train.step, summed.total.step) == ("prepare", "train", "in all")
    assert (train.tries, train.node_hours, train.gpu_hours.value) == (3, 4.0, 32.0)
    assert train.gpu_kwh.value == 8.0 and train.cpu_kwh.value == pytest.approx(0.2)
    assert summed.total.node_hours == 5.0 and summed.total.kwh.value == pytest.approx(8.3)
    assert (summed.total.read, summed.total.written) == (3_000_000_000, 500_000_000)
    assert summed.total.money is None and summed.total.gco2 is None
    assert [len(row) for row in summed.table()] == [7] * 4


def test_money_and_carbon_follow_from_the_prices():
    prices = Prices(
        "EUR", node_hour=1.0, gpu_hour=2.0, kwh=0.5, gb_read=0.1, gb_written=0.2, gco2_per_kwh=400
    )
    used = [record("train", 1, gpus=2, gpu_joules=0.9 * KWH, read=10**9, written=2 * 10**9)]
    total = costs.summed(used, prices).total
    assert total.money is not None and total.gco2 is not None
    assert total.money.value == pytest.approx(1 + 4 + 0.5 + 0.1 + 0.4)
    assert total.gco2.value == pytest.approx(400)
    header, row, _ = costs.summed(used, prices).table()
    assert header[-2:] == ("EUR", "gCO2") and row[-2:] == ("6.00", "400.0")


def test_what_nobody_measured_is_unknown_and_makes_sums_a_lower_bound():
    lacking = record("prepare", 1, cpu_joules=None)
    table = costs.summed([lacking, record("train", 2)], Prices(gco2_per_kwh=500)).table()
    assert [row[3] for row in table] == ["CPU kWh", "-", "0.100", ">=0.100"]
    assert [row[-1] for row in table] == ["gCO2", "-", "50.0", ">=50.0"]
    gpus = record("train", 1, gpus=None, gpu_joules=None)
    assert costs.summed([gpus]).total.gpu_hours.value is None
    fields = costs.summed([lacking, record("train", 2)]).fields()["total"]
    assert fields["cpu_kwh"] == {"value": pytest.approx(0.1), "incomplete": True}


def test_watts_make_an_estimate_of_it_which_says_so():
    prices = Prices(watts_per_node=200, watts_per_gpu=300, kwh=1.0)
    used = [record("train", 1, gpus=2, gpu_joules=None, cpu_joules=None), record("export", 2)]
    train, export = costs.summed(used, prices).steps
    assert (train.cpu_kwh, train.gpu_kwh) == (Figure(0.2, False, True), Figure(0.6, False, True))
    assert export.cpu_kwh == Figure(0.1)  # what was measured goes before
    assert train.money is not None and train.money.shown(2) == "~0.80"
    assert costs.summed(used, prices).fields()["steps"][0]["gpu_kwh"]["estimated"]


def test_a_price_of_what_is_unknown_makes_the_money_a_lower_bound():
    unknown = record("train", 1, gpus=None, gpu_joules=None)
    money = costs.summed([unknown], Prices(node_hour=1.0, gpu_hour=2.0)).total.money
    assert money is not None and money.shown(2) == ">=1.00"
    money = costs.summed([unknown], Prices(node_hour=1.0)).total.money
    assert money is not None and money.shown(2) == "1.00"


def test_without_records_nothing_is_told():
    assert not costs.summed([])
    assert not costs.of_run("/nowhere/at/all", "r")


def test_what_kubeflow_shows_are_numbers_that_are_known():
    numbers = costs.summed([record("train", 1, gpus=None, gpu_joules=None)], Prices(node_hour=3.0)).numbers()
    assert numbers["used/node_hours"] == 1.0 and numbers["used/money"] == 3.0
    assert "used/gpu_hours" not in numbers and all(isinstance(value, float) for value in numbers.values())


def test_prices_that_cannot_be_used_cost_a_warning_and_not_the_step(tmp_path, caplog):
    (tmp_path / "prices.yaml").write_text("gpu: 2")
    assert not costs.of_run(str(tmp_path), "r")
    assert "prices.yaml" in caplog.text
