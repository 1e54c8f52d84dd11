"""The step that is measured is the loop's: as many operations of each kind, and the same weights after it."""

import collections
import dataclasses

import pytest
import torch
from steps import steps_of
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import training
from trainer.config import LoaderConfig
from trainer.distributed import SINGLE
from trainer.errors import TrainingError
from trainer.recipes import load
from trainer.signals import StopRequest
from trainer.state import TrainState


class Named(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train__precision": "fp32"},
        {"train__optimizer": "sgd", "train__clip_norm": 0, "train__ema_decay": 0, "loader__brightness": 0},
        pytest.param({"train__precision": "fp16"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_step_does_what_the_loop_does(overrides, shards, tiny, tmp_path, monkeypatch):
    config = tiny(**overrides)
    with steps_of(config, shards, str(tmp_path)) as (run, _):
        # The learning rate depends on how long the training is to be.
        monkeypatch.setattr(training, "_PLANNED", run.steps)
        trained = training.Trained(TrainState(config, len(run.train_set.categories), SINGLE), config)
        batches = run.loader.batches(0)
        for _ in range(3):
            batch = next(batches)
            assert (batch.color is None) == ("loader__brightness" in overrides)
            with Named() as theirs:
                expected = run._train_step([batch], StopRequest())[0]
            run.state.step += 1
            with Named() as mine:
                found = trained.step(training.Inputs(*batch[:4]))
            assert torch.equal(found, expected)
            assert mine.count == theirs.count
    for one, other in zip(trained.state.parameters, run.state.parameters, strict=True):
        assert torch.equal(one, other)


def test_a_step_that_is_left_out_is_not_measured(tiny):
    config = tiny(train__precision="fp32")
    trained = training.Trained(TrainState(config, 3, SINGLE), config)
    inputs = training.Inputs(
        torch.zeros(1, 3, 96, 96, dtype=torch.uint8), torch.zeros(1, 1, 4), torch.full((1, 1), -1)
    )
    trained.step(inputs)
    trained.state.parameters[0].register_hook(lambda gradient: gradient * float("nan"))
    trained.step(inputs)
    with pytest.raises(TrainingError, match="not finite at step 2"):
        trained.step(inputs)


def test_photographs_have_their_sizes_and_colours_changed():
    plain = LoaderConfig(image_size=96, workers=3, prefetch=2, decoder="gpu")
    changed = training.like_photographs(plain)
    assert changed == dataclasses.replace(
        load("finetune").loader, image_size=96, workers=3, prefetch=2, decoder="gpu"
    )
    assert changed.scale[0] < 1 < changed.scale[1] and changed.brightness and changed.contrast
    maps = training.color_maps(changed, 4, torch.device("cpu"))
    assert maps.shape == (4, 3, 4) and maps.dtype == torch.float32 and len(maps.unique(dim=0)) == 4
    assert training.color_maps(plain, 4, torch.device("cpu")) is None
