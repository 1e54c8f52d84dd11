"""Trial passes, on a memory that ends where the test says."""

import pytest
import torch
from torch import nn

from trainer.launching.distributed import SINGLE
from trainer.model.architectures.retinanet.retinanet import RetinaNet
from trainer.training import throughput_probe
from trainer.training.batch_fitting import Trial
from trainer.training.state import TrainState

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.fixture
def small_memory(monkeypatch):
    """A device of that many images: a forward pass of more runs out of memory."""
    forward = RetinaNet.forward

    def limit(most, error=FULL):
        def limited(self, images, *targets):
            if len(images) > most:
                raise error
            return forward(self, images, *targets)

        monkeypatch.setattr(RetinaNet, "forward", limited)

    return limit


def state_of(config):
    return TrainState(config, 5, SINGLE)


def test_a_trial_leaves_the_state_as_it_was(small_memory, tiny):
    config = tiny(loader__sizes=[96, 160])
    state = state_of(config)
    before = {name: value.clone() for name, value in state.detector.state_dict().items()}
    random = torch.get_rng_state()
    small_memory(2)
    trial = Trial(config, state, 2**30)
    assert trial.side == 160 and trial(2) and not trial(3)
    assert all(torch.equal(value, before[name]) for name, value in state.detector.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in state.parameters)


def test_errors_of_libraries_below_torch_count_and_others_do_not(small_memory, tiny):
    trial = Trial(tiny(), state_of(tiny()), 2**30)
    small_memory(1, RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not trial(2)
    small_memory(1, RuntimeError("a size does not match"))
    with pytest.raises(RuntimeError, match="does not match"):
        trial(2)


def test_layers_that_wait_for_other_processes_do_not_in_a_trial(tiny, process_group):
    """Where memory ran out on one, the others would wait for it for ever."""
    config = tiny()
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
