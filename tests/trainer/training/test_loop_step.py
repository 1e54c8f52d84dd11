"""One step of the loop: the host waits for nothing, and what is not finite is not applied."""

import copy

import pytest
import torch
from steps import losing, steps_of, with_one_broken_loss
from waiting import Arrived, Counter

from trainer.base.errors import TrainingError
from trainer.launching.distributed import SINGLE
from trainer.training.step import start_flag_exchange


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train__clip_norm": 0.0, "train__optimizer": "sgd", "loader__hue": 0.1},
        {"train__batch_size": 1, "train__global_batch": 2, "train__optimizer": "adam"},
        pytest.param({"train__precision": "fp16"}, marks=pytest.mark.slow),
    ],
)
def test_the_host_waits_for_nothing_in_a_step(overrides, shards, tiny, tmp_path, monkeypatch):
    """Data, network, losses, guard, clipping, optimizer and moving average."""
    # What the guard reads has been copied to the host by then.
    monkeypatch.setattr("trainer.training.step.copy_to_host", lambda values: lambda: Arrived(values))
    with steps_of(tiny(**overrides), shards, str(tmp_path)) as (run, step):
        step(), step()
        # Collating is the host's own work; it makes tensors of lists and floats.
        batches = [next(run.loader.batches(0)) for _ in range(run.loader.pass_count)]
        with Counter() as counter:
            run.train_step(batches)
        assert counter.waiting == [] and counter.operations > 300
        step()


class Graphs:
    """Treats gradients as CUDA graphs do: what autograd took of their memory is lost at their next run."""

    def __init__(self):
        self.own = None

    def __call__(self, detector, mode, world, **_):
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
    gradients = []
    for name in ("plain", "graphs"):
        if name == "graphs":
            monkeypatch.setattr("trainer.training.loop.compile_detector", Graphs())
        with steps_of(config, shards, str(tmp_path / name)) as (run, step):
            assert run.loader.pass_count == passes
            assert run.keeps_gradients == (name == "graphs" and passes > 1)
            step(), step()
            gradients.append(step())
            run.train_step.wait()
    assert torch.equal(*gradients)


def test_a_gradient_that_is_not_finite_is_not_applied(shards, tiny, tmp_path):
    config = tiny(train__precision="fp32", train__ema_decay=0.0)
    with steps_of(config, shards, str(tmp_path)) as (run, step):
        step(), step()
        before = {name: value.clone() for name, value in run.state.detector.named_parameters()}
        handle = run.state.parameters[0].register_hook(lambda gradient: gradient * float("nan"))
        step()
        handle.remove()
        with pytest.raises(
            TrainingError, match=r"at step 3 of 12: .*norm of the gradient nan, image ids \["
        ) as caught:
            step()
        assert "train.lr" in caught.value.fix
        assert all(torch.equal(value, before[name]) for name, value in run.state.detector.named_parameters())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_is_in_every_gradient(bad, shards, tiny, tmp_path):
    """Where ranks share gradients all of them see it there, before their optimizers begin."""
    with steps_of(tiny(train__precision="fp32"), shards, str(tmp_path)) as (run, step):
        step()
        seen = []
        run.state.optimizer.register_step_pre_hook(
            lambda *_: seen.append([bool(p.grad.isnan().all()) for p in run.state.parameters])
        )
        with losing(run, bad):
            step()
        assert len(seen) == 1 and all(seen[0])
        with pytest.raises(TrainingError, match=r"not finite at step 2 of 12: .*boxes (inf|nan)"):
            step()


@pytest.mark.slow
def test_no_rank_applies_what_is_not_finite_in_one_of_them(shards, tiny, tmp_path):
    config = tiny(train__precision="fp32", train__ema_decay=0.0)
    torch.multiprocessing.start_processes(
        with_one_broken_loss, (config, shards, str(tmp_path)), nprocs=2, start_method="forkserver"
    )
    for rank in (0, 1):
        same, _, message = (tmp_path / f"{rank}.txt").read_text().partition(" ")
        assert same == "True"
        assert "not finite at step 2" in message and "rank 1: " in message and "boxes inf" in message


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_step_does_not_change_weights_and_optimizer(kind, bad):
    parameter = torch.ones(3, requires_grad=True)
    optimizer = kind([parameter], lr=0.1, fused=True)
    history, reports = [], []
    for number, loss in enumerate([1.0, bad, 2.0]):
        parameter.grad = torch.full((3,), loss)
        reports.append(
            start_flag_exchange(optimizer, torch.tensor([loss, 0.5]), (number == 2, number / 4), SINGLE)
        )
        optimizer.step()
        history.append((parameter.detach().clone(), copy.deepcopy(optimizer.state[parameter])))
    broken, stopping, shares, losses, others = zip(*(report().tolist() for report in reports), strict=True)
    assert broken == (0, 1, 0) and stopping == (0, 0, 1) and shares == (0, 0.25, 0.5)
    assert losses[::2] == (1.0, 2.0) and others == (0.5, 0.5, 0.5)
    first, second, third = history
    assert torch.equal(first[0], second[0]) and not torch.equal(second[0], third[0])
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items() if value is not None)
