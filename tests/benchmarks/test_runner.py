"""The sets of benchmarks: how long they take together, and what a machine for them has to have."""

import sys

import pytest
import torch

from benchmarks import __main__ as runner

SHARDS, DETR = runner.NEEDS["loader"], runner.NEEDS["detr_step"]


@pytest.fixture
def ran(monkeypatch):
    """Run the runner, whose benchmarks take no time and say how many seconds it was; gives the names."""
    names = []

    def run(*arguments, seconds=1.0):
        def one(name, options):
            names.append(name)
            return runner.Run(name, {"name": name, "ratio": 2.0}, "", seconds, 0.5)

        monkeypatch.setattr(runner, "run", one)
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        names.clear()
        assert runner.main() == 0
        return names

    return run


@pytest.mark.parametrize(
    ("gpus", "packages", "left_out"),
    [
        (1, SHARDS + DETR, {"scaling": "it compares several GPUs with one, and this machine has one"}),
        (8, SHARDS + DETR, {}),
        (8, SHARDS, {"detr_step": "it needs transformers, scipy"}),
        (8, SHARDS[1:-1] + DETR, {"loader": f"it needs {SHARDS[0]}, {SHARDS[-1]}"}),
    ],
)
def test_what_a_machine_with_gpus_cannot_run_is_left_out(gpus, packages, left_out, ran, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: name if name in packages else None)
    assert ran("--set", "gpu") == [name for name in runner.SETS["gpu"] if name not in left_out]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert lines == [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    assert ran("--set", "gpu", "scaling", "loader") == ["scaling", "loader"], "asked for by name, it is run"
