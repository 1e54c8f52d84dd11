"""What the steps are compared with, and what becomes of one that the memory does not hold."""

import argparse
import json
import sys

import pytest
import torch

from benchmarks import common, step, stock_step
from trainer.base.errors import ConfigError
from trainer.model.recipes import load

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "case", "label"),
    [
        ("91:256", (91, 256, "", 0), "91_256px"),
        ("601:512@3", (601, 512, "", 3), "601_512px"),
        ("264:800:mlperf@2", (264, 800, "mlperf", 2), "264_800px_mlperf"),
    ],
)
def test_cases(text, case, label):
    assert step.parse(text) == case and step.parse(text).label == label


@pytest.mark.parametrize(
    "text", ["", "91", "91:", "x:256", "91:256@", "91:256@x", "91:256:mlperf:v2", "91:-1"]
)
def test_what_is_no_case(text):
    with pytest.raises(ConfigError, match="--cases"):
        step.parse(text)


@pytest.mark.parametrize(
    ("cases", "figures", "expected"),
    [
        ("91:256,601:256,601:512", ["ratio_601_256px", "ratio_601_512px"], "ratio_601_512px"),
        ("601:256@5,91:800", ["ratio_91_800px", "ratio_601_256px"], "ratio_601_256px"),
        ("9:8,9:8:mlperf", ["ratio_9_8px", "ratio_9_8px_mlperf"], "ratio_9_8px_mlperf"),
        ("601:800", ["ratio_601_800px", "ratio_to_amp_601_800px"], "ratio_to_amp_601_800px"),
        ("601:800", ["ratio_to_bf16_601_800px"], "ratio_to_bf16_601_800px"),
        ("91:800,601:800", ["ratio_91_800px"], "ratio_91_800px"),
    ],
)  # fmt: skip
def test_the_headline_is_of_the_most_classes(cases, figures, expected):
    values = {name: float(number) for number, name in enumerate(figures, 1)}
    assert step.headline([step.parse(case) for case in cases.split(",")], values) == values[expected]


def test_nothing_to_compare_with_is_no_ratio():
    assert step.headline([step.parse("601:800")], {"images_per_second_601_800px": 9.0}) == 0


class Candidates:
    """Stand for the real ones: they compute nothing, and count their steps."""

    def __init__(self, monkeypatch, broken):
        self.steps, self.broken, self.dtypes = [], broken, []
        monkeypatch.setattr(step, "random_batch", lambda *_: None)
        monkeypatch.setattr(step, "stock", self.stock)
        monkeypatch.setattr(
            step, "ours", lambda *_, **__: {name: self.one(name) for name in ("ours", "ours_augmented")}
        )
        monkeypatch.setattr(step, "on_a_gpu", lambda candidate, *_, **__: {"waits": 0})
        monkeypatch.setattr(common, "synchronize", lambda device: None)

    def stock(self, batch, config, classes, dtype):
        self.dtypes.append(dtype)
        return self.one(next(name for name, stock_dtype in step.STOCK.items() if stock_dtype == dtype))

    def one(self, name):
        def run():
            self.steps.append(name)
            if self.broken.get(name) == self.steps.count(name):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")

        return stock_step.Candidate(run, lambda: torch.zeros(1))


def measured(device, text="3:96@2"):
    options = argparse.Namespace(device=device, images=2, rounds=3, clock="wall", network="off")
    return step.measure(step.parse(text), options)


def test_a_gpu_measures_amp_as_well(monkeypatch):
    candidates = Candidates(monkeypatch, {})
    assert {"ratio", "ratio_to_bf16", "ratio_to_amp", "stock_amp_waits"} <= measured(GPU).keys()
    assert candidates.dtypes == [None, torch.bfloat16, torch.float16]
    assert candidates.steps == 3 * ["stock", "ours_augmented", "stock_bf16", "stock_amp", "ours"]
    assert {"ratio_to_amp_91_800px", "ratio_to_amp_601_800px"} <= step.GOALS["cuda"].keys()


def test_a_cpu_does_not(monkeypatch):
    candidates = Candidates(monkeypatch, {})
    assert "ratio_to_amp" not in measured(CPU) and candidates.dtypes == [None, torch.bfloat16]


@pytest.mark.parametrize("turn", [1, 3])
def test_what_the_memory_does_not_hold_is_left_out(turn, monkeypatch, capsys):
    candidates = Candidates(monkeypatch, {"stock": turn, "stock_bf16": turn})
    monkeypatch.setattr(step, "measure", lambda case, options, real=step.measure: real(case, FAKE(options)))
    monkeypatch.setattr(sys, "argv", ["benchmarks/step.py", "--device", "cpu", "--cases", "601:800@4"])
    step.main()
    printed = capsys.readouterr().out.splitlines()
    message = "left out: {}, which the memory does not hold: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert [line for line in printed if line.startswith("left")] == [
        message.format("stock"), message.format("stock_bf16")
    ]  # fmt: skip
    result = json.loads(printed[-1])
    names = {name.removesuffix("_601_800px") for name in result["figures"]}
    assert {"ratio_to_amp", "images_per_second", "ours_s", "stock_amp_s"} <= names
    assert not names & {"ratio", "ratio_to_bf16", "stock_s", "stock_bf16_s", "stock_waits"}
    assert result["ratio"] == round(result["figures"]["ratio_to_amp_601_800px"], 3) > 0
    assert candidates.steps.count("stock") == turn and candidates.steps.count("ours") == 5


def FAKE(options):
    """The same options on a GPU, which none of the candidates here needs."""
    return argparse.Namespace(**{**vars(options), "device": GPU})


def test_that_ours_does_not_fit_is_no_detail(monkeypatch):
    Candidates(monkeypatch, {"ours": 1})
    with pytest.raises(torch.OutOfMemoryError):
        measured(GPU)


@pytest.mark.parametrize("recipe", ["coco_r50", "openimages_r50", "mlperf"])
def test_torchvision_has_the_network_of_a_recipe(recipe):
    ours = {
        name: tuple(value.shape)
        for name, value in step.TrainState(
            step.without_weights(load(recipe)), 4, step.World(0, 1, CPU)
        ).detector.named_parameters()
    }
    model = common.stock_model(4, 96, CPU, load(recipe).model)
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == ours


@pytest.mark.parametrize("recipe", ["finetune", "small", "debug"])
def test_or_it_is_not_compared_with(recipe):
    with pytest.raises(ConfigError, match=r"torchvision has no RetinaNet like that .*model\."):
        common.stock_model(4, 96, CPU, load(recipe).model)
