"""The step that is measured is the loop's."""

import dataclasses

import torch
from steps import steps_of

from benchmarks import training
from trainer.config.schema import LoaderConfig
from trainer.launching.distributed import SINGLE
from trainer.model.recipes import load
from trainer.training.state import TrainState


def test_a_step_is_the_loops(shards, tiny, tmp_path):
    config = tiny(train__precision="fp32", train__batch_size=2, train__global_batch=2)
    with steps_of(config, shards, str(tmp_path)) as (run, _):
        state = TrainState(config, len(run.train_set.categories), SINGLE)
        step, batch = training.step_of(state, config, 2), next(run.loader.batches(0))
        assert step.losses(batch) == run.train_step.losses(batch)
        assert torch.equal(step([batch])[0], run.train_step([batch])[0])
    assert (state.step, state.samples) == (1, 2)


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
