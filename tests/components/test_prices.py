"""A file of prices: where it is found, and what is wrong with it."""

import pytest

from components import prices
from trainer.base.errors import ConfigError, StorageError


def test_what_is_named_is_read_and_the_rest_costs_nothing(tmp_path):
    (tmp_path / "p.yaml").write_text("currency: EUR\nnode_hour: 0.5\ngpu_hour: 2\n")
    read = prices.read(str(tmp_path / "p.yaml"))
    assert read == prices.Prices(currency="EUR", node_hour=0.5, gpu_hour=2.0) and read.has_money
    (tmp_path / "p.json").write_text('{"currency": "EUR"}')
    assert not prices.read(str(tmp_path / "p.json")).has_money


def test_the_variable_goes_before_the_data_roots_own(tmp_path, monkeypatch):
    monkeypatch.delenv(prices.VARIABLE, raising=False)
    assert prices.find(str(tmp_path)) is None
    (tmp_path / "prices.yaml").write_text("gb_read: 0.3")
    assert prices.find(str(tmp_path)) == prices.Prices(gb_read=0.3)
    (tmp_path / "other.yaml").write_text("gb_read: 0.4")
    monkeypatch.setenv(prices.VARIABLE, str(tmp_path / "other.yaml"))
    assert prices.find(str(tmp_path)) == prices.Prices(gb_read=0.4)
    monkeypatch.setenv(prices.VARIABLE, str(tmp_path / "none.yaml"))
    with pytest.raises(StorageError, match=r"none\.yaml"):
        prices.find(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu_hours: 2", "gpu_hours"),
        ("gpu_hour: -1", "gpu_hour"),
        ("gpu_hour: .inf", "gpu_hour"),
        ("gpu_hour: cheap", "gpu_hour"),
        ("- 1", "no file of prices"),
        ("gpu_hour: {", "not YAML"),
        ("[" * 300, "not YAML"),
    ],
)
def test_what_is_no_price_is_named_with_what_may_stand_there(tmp_path, text, said):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        prices.read(str(tmp_path / "p.yaml"))
    assert "gb_written" in caught.value.fix
