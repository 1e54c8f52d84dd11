"""One step of the loop: the host waits for nothing, and what is not finite is not applied."""

import pytest
import torch
from waiting import Counter

from trainer.distributed import SINGLE, World
from trainer.errors import TrainingError
from trainer.loop import _Run
from trainer.signals import StopRequest


def step_of(config, shards, output):
    """A run that has done two steps, and its next one."""
    run = _Run(config, shards, output, SINGLE, "none")
    batches, stop = run.loader.batches(0), StopRequest()

    def step():
        sums, stopping = run._train_step([next(batches) for _ in range(run.loader.passes)], stop)
        run.state.step += 1
        return sums, stopping

    step()
    step()
    return run, step


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train__clip_norm": 0.0, "train__optimizer": "sgd", "loader__hue": 0.1},
        {"train__batch_size": 1, "train__global_batch": 2, "train__optimizer": "adam"},
        pytest.param({"train__precision": "fp16"}, marks=pytest.mark.slow),
    ],
)
def test_the_host_waits_for_nothing_in_a_step(overrides, shards, tiny, tmp_path):
    """Data, network, losses, guard, clipping, optimiser and moving average."""
    run, step = step_of(tiny(**overrides), shards, str(tmp_path))
    # Collating is the host's own work; it makes tensors of lists and floats.
    made = [next(run.loader.batches(0)) for _ in range(run.loader.passes)]
    with Counter() as counter:
        run._train_step(made, StopRequest())
    assert counter.waiting == [] and counter.operations > 300
    step()
    run.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_nothing_in_a_step_on_a_gpu(shards, tiny, tmp_path):
    world = World(0, 1, torch.device("cuda", 0))
    run = _Run(tiny(), shards, str(tmp_path), world, "none")
    batches = run.loader.batches(0)
    try:
        for step in range(4):
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            run._train_step([next(batches) for _ in range(run.loader.passes)], StopRequest())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.close()


class Graphs:
    """Treats gradients as CUDA graphs do: what autograd took of their memory is lost at their next run."""

    def __init__(self):
        self.own = None

    def __call__(self, detector, mode, world):
        detector.register_forward_pre_hook(self.run)
        return True

    def run(self, detector, arguments):
        gradients = [p.grad for p in detector.parameters() if p.grad is not None]
        if self.own is None:
            self.own = {gradient.data_ptr() for gradient in gradients}
        for gradient in gradients:
            if gradient.data_ptr() not in self.own:
                gradient.fill_(float("nan"))


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_outlive_the_next_pass_of_cuda_graphs(passes, shards, tiny, tmp_path, monkeypatch):
    config = tiny(train__precision="fp32", train__batch_size=2 // passes, train__global_batch=2)
    found = []
    for name in ("plain", "graphs"):
        if name == "graphs":
            monkeypatch.setattr("trainer.loop.compile_detector", Graphs())
        run, step = step_of(config, shards, str(tmp_path / name))
        assert run.loader.passes == passes and run.holds_gradients == (name == "graphs" and passes > 1)
        found.append(step()[0])
        run._accept(run.guard.settle())
        run.close()
    assert torch.equal(*found)


def test_a_gradient_that_is_not_finite_is_not_applied(shards, tiny, tmp_path):
    run, step = step_of(tiny(train__precision="fp32", train__ema_decay=0.0), shards, str(tmp_path))
    before = {name: value.clone() for name, value in run.state.detector.named_parameters()}
    weight = run.state.parameters[0]
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    step()
    handle.remove()
    with pytest.raises(TrainingError, match=r"at step 3 of 12 .*norm of the gradient nan, image ids \["):
        step()
    assert all(torch.equal(value, before[name]) for name, value in run.state.detector.named_parameters())
    run.close()
