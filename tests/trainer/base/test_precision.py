"""Which arithmetic is used where, and what is said of it."""

import pytest
import torch

from trainer.base import precision


@pytest.fixture(autouse=True)
def anew():
    precision.resolve.cache_clear()
    yield
    precision.resolve.cache_clear()


@pytest.mark.parametrize(("device", "name"), [("cpu", "CPU"), ("cuda", "GPU")])
def test_bf16_becomes_fp32_where_there_are_no_instructions_for_it(device, name, monkeypatch, caplog):
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    caplog.set_level("INFO")
    assert [precision.resolve(device, "bf16") for _ in range(3)] == ["fp32"] * 3
    (record,) = caplog.records  # said once
    assert record.levelname == "INFO" and f"this {name} has no bf16 instructions" in record.message
    assert precision.resolve(device, "fp16") == "fp16" and precision.resolve(device, "fp32") == "fp32"


def test_bf16_is_used_where_there_are(monkeypatch, caplog):
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert {precision.resolve(device, "bf16") for device in ("cpu", "cuda")} == {"bf16"}
    with precision.autocast(torch.device("cpu"), "bf16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert not caplog.records
