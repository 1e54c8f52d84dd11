"""The search for the most images of a pass, on a memory that ends where the test says."""

import logging
from types import SimpleNamespace

import pytest
import torch
from finished_runs import assert_same_weights, final_weights, losses, stopped_after
from torch import nn

from trainer.base.errors import TrainingError
from trainer.launching.distributed import SINGLE
from trainer.model.architectures.retinanet.retinanet import RetinaNet
from trainer.training import batch_fitting, throughput_probe
from trainer.training.batch_fitting import Trial, fitting_batch
from trainer.training.loop import train
from trainer.training.state import TrainState

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.fixture
def small_memory(monkeypatch):
    """A device of that many images: a forward pass of more runs out of memory."""
    forward, passes = RetinaNet.forward, []

    def limit(most, error=FULL):
        def limited(self, images, *targets):
            passes.append(len(images))
            if len(images) > most:
                raise error
            return forward(self, images, *targets)

        monkeypatch.setattr(RetinaNet, "forward", limited)
        monkeypatch.setattr(batch_fitting, "memory", lambda device: 2**30)
        return passes

    return limit


def state_of(config):
    return TrainState(config, 5, SINGLE)


@pytest.mark.parametrize("boundary", range(1, 15))
def test_the_largest_of_all_numbers_of_passes_is_found_by_halving(boundary, tiny, monkeypatch):
    tried = []
    monkeypatch.setattr(batch_fitting, "memory", lambda device: 2**30)
    monkeypatch.setattr(Trial, "__call__", lambda self, images: tried.append(images) or images <= boundary)
    config = tiny(train__find_batch_size=True)
    fitted = fitting_batch(config, SimpleNamespace(world=SINGLE), 13, None)["images"]
    assert fitted == max(size for size in (1, 2, 3, 4, 5, 7, 13) if size <= boundary)
    assert len(tried) <= 3 and len(set(tried)) == len(tried)


def test_it_keeps_the_global_batch_and_leaves_the_state_as_it_was(small_memory, tiny, caplog):
    caplog.set_level(logging.INFO, "train")
    config = tiny(train__find_batch_size=True, train__global_batch=12, loader__sizes=[96, 160])
    state = state_of(config)
    before = {name: value.clone() for name, value in state.detector.state_dict().items()}
    random = torch.get_rng_state()
    small_memory(5)
    fitted = fitting_batch(config, state, 12, None)
    assert fitted == {"images": 4, "processes": 1, "memory": 2**30}
    assert "up to 4 images of 160 pixels fit" in caplog.text and "has 3 passes" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in state.detector.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in state.parameters)


def test_errors_of_libraries_below_torch_count_and_others_do_not(small_memory, tiny):
    config = tiny(train__find_batch_size=True)
    small_memory(1, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert fitting_batch(config, state_of(config), 4, None)["images"] == 1
    small_memory(1, RuntimeError("a size does not match"))
    with pytest.raises(RuntimeError, match="does not match"):
        fitting_batch(config, state_of(config), 4, None)


def test_where_not_even_one_image_fits_it_is_said(small_memory, tiny):
    config = tiny(train__find_batch_size=True)
    small_memory(0)
    with pytest.raises(TrainingError, match="not even one image of 96 pixels fits") as caught:
        fitting_batch(config, state_of(config), 4, None)
    assert "loader.image_size" in caught.value.fix


def test_a_resumed_run_takes_what_was_found_on_as_much_memory(small_memory, tiny):
    config = tiny(train__find_batch_size=True)
    passes = small_memory(2)
    state = state_of(config)
    fitted = fitting_batch(config, state, 4, None)
    tried = len(passes)
    assert fitting_batch(config, state, 4, {"batch": fitted}) == fitted and len(passes) == tried
    other = {"batch": {**fitted, "memory": 2**34, "images": 4}}
    assert fitting_batch(config, state, 4, other) == fitted and len(passes) > tried
    # What was configured before is not what was found.
    assert fitting_batch(config, state, 4, {"batch": {"images": 4}}) == fitted


def test_it_has_no_effect_on_a_cpu(tiny, caplog):
    config = tiny(train__find_batch_size=True)
    assert fitting_batch(config, state_of(config), 4, None) == {"images": config.train.batch_size}
    assert "train.find_batch_size has no effect on a CPU" in caplog.text


@pytest.mark.slow
def test_a_training_goes_on_with_it_bit_for_bit(small_memory, shards, tiny, tmp_path, monkeypatch):
    config = tiny(train__find_batch_size=True, train__global_batch=4, train__batch_size=1)
    passes = small_memory(2)
    train(config, shards, str(tmp_path / "whole"))
    assert set(passes[3:]) == {2}, "after the trials two passes of two"
    with stopped_after(3):
        train(config, shards, str(tmp_path / "parts"))
    monkeypatch.setattr(Trial, "__call__", pytest.fail)
    train(config, shards, str(tmp_path / "parts"))
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    assert_same_weights(final_weights(str(tmp_path / "parts")), final_weights(str(tmp_path / "whole")))


def test_layers_that_wait_for_other_processes_do_not_in_a_trial(tiny, process_group):
    """Where memory ran out on one, the others would wait for it for ever."""
    config = tiny(train__find_batch_size=True)
    state = state_of(config)
    state.detector = nn.SyncBatchNorm.convert_sync_batchnorm(state.detector)
    before = {name: value.clone() for name, value in state.detector.state_dict().items()}
    trial = Trial(config, state, 2**30)
    assert trial(2)
    waiting = [module for module in state.detector.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert len(waiting) > 10
    assert all(torch.equal(value, before[name]) for name, value in state.detector.state_dict().items())
    with pytest.raises(ValueError, match="SyncBatchNorm"):  # As they are, they would ask, on GPUs alone.
        trial._forward_backward(2)


def test_the_speed_is_measured_at_the_mean_area_of_all_sizes(tiny, monkeypatch):
    tried = []

    class Noted(Trial):
        def __call__(self, images):
            tried.append(self.side)
            return super().__call__(images)

    monkeypatch.setattr(throughput_probe, "Trial", Noted)
    monkeypatch.setattr(throughput_probe, "_SECONDS", 0.01)
    config = tiny(loader__sizes=[96, 192, 192, 192, 192, 192])  # The root of their mean area is 179.
    assert throughput_probe.images_per_second(config, 5, torch.device("cpu")) > 0
    assert set(tried) == {192}
    throughput_probe.images_per_second(tiny(loader__sizes=[96, 192]), 5, torch.device("cpu"))
    assert set(tried) == {192, 160}
