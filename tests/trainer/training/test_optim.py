"""Learning rate, parameter groups and the moving average."""

import dataclasses
import itertools
import math

import pytest
import torch

from trainer.config.schema import TrainConfig
from trainer.training.optim import (
    MovingAverage,
    build_optimizer,
    learning_rate,
    scale_to_batch,
    set_learning_rate,
)


def test_warm_up_then_cosine():
    config = TrainConfig(lr=1.0, warmup_steps=10, schedule="cosine")
    rates = [learning_rate(step, 110, config) for step in range(110)]
    assert rates[0] == pytest.approx(0.1, abs=0.01) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[60] == pytest.approx(0.505, abs=0.01)
    assert rates[109] == pytest.approx(0.01, abs=0.001)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_multistep_drops_where_torchvision_drops():
    config = dataclasses.replace(TrainConfig(lr=0.01, warmup_steps=0), schedule="multistep")
    epochs = [learning_rate(epoch * 100, 2600, config) for epoch in range(26)]
    assert epochs[:16] == [0.01] * 16
    assert epochs[16:22] == pytest.approx([0.001] * 6) and epochs[22:] == pytest.approx([0.0001] * 4)


@pytest.mark.parametrize(
    ("optimizer", "lr_batch", "images", "peak", "told"),
    [
        ("sgd", 0, 64, 0.01, "0.01, not scaled to 64 images per step"),
        ("sgd", 32, 8, 0.0025, "0.0025 for 8 images per step: 0.01 for 32, times 8/32 (sgd)"),
        ("adamw", 16, 64, 0.02, "0.02 for 64 images per step: 0.01 for 16, times the root of 64/16 (adamw)"),
    ],
)
def test_the_learning_rate_follows_the_global_batch(optimizer, lr_batch, images, peak, told):
    config = TrainConfig(lr=0.01, optimizer=optimizer, lr_batch=lr_batch)
    scaled, words = scale_to_batch(config, images)
    assert scaled.lr == pytest.approx(peak) and told in words
    assert scaled == dataclasses.replace(config, lr=scaled.lr)


def test_all_lengths_follow_the_global_batch_as_the_authors_of_dfine_recommend():
    """The example of their README: from 32 to 64 images a step."""
    config = TrainConfig(
        optimizer="adamw",
        lr=2.5e-4,
        lr_batch=32,
        lr_scaling="linear",
        scale_steps=True,
        warmup_steps=500,
        ema_decay=0.9999,
        ema_ramp="exponential",
        ema_steps=1000,
    )
    scaled, _ = scale_to_batch(config, 64)
    assert (scaled.lr, scaled.ema_decay) == pytest.approx((5e-4, 0.9998))
    assert (scaled.ema_steps, scaled.warmup_steps) == (500, 250)
    assert scale_to_batch(dataclasses.replace(config, ema_decay=0.0), 64)[0].ema_decay == 0


class Layers(torch.nn.Sequential):
    """Layers with groups; `scales` are the learning rates of each, relative to the training's."""

    scales = (None,)

    def parameter_groups(self, config):
        more = [{} if scale is None else {"lr_scale": scale} for scale in self.scales]
        parts = [self] if len(self.scales) == 1 else self
        return [
            {"params": [p for p in part.parameters() if p.requires_grad], **fields}
            for part, fields in zip(parts, more, strict=True)
        ]


@pytest.mark.parametrize(("kind", "expected"), [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")])
def test_weights_norms_and_biases_have_their_own_decay(kind, expected):
    model = Layers(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GroupNorm(2, 4))
    optimizer = build_optimizer(model, TrainConfig(optimizer=kind, weight_decay=0.1, bias_weight_decay=0.05))
    assert type(optimizer).__name__ == expected and all(group["fused"] for group in optimizer.param_groups)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    special = {"0.weight": 0.1, "0.bias": 0.05}
    assert decays == {id(p): special.get(name, 0.0) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_first_step_that_is_skipped_changes_nothing(kind):
    """A gradient scaler skips it by `found_inf`; uninitialized memory is filled with NaN here."""

    def trained(skips):
        torch.manual_seed(0)
        model = Layers(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        config = TrainConfig(optimizer=kind, weight_decay=0.1)
        optimizer = build_optimizer(model, config)
        for step in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(step + 1))
            optimizer.found_inf = torch.tensor(float(step in skips))
            optimizer.grad_scale = None
            if step in skips:
                optimizer.step()
                model.zero_grad()
            elif step > 1:
                optimizer.step()
        return [*model.parameters(), *(t for each in optimizer.state.values() for t in each.values())]

    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(trained(skips={0, 1}), trained(skips=()), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_first_step_of_sgd_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = (Layers(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = TrainConfig(optimizer="sgd", weight_decay=0.1, lr=0.1)
    groups = build_optimizer(theirs, config).param_groups
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    optimizers = [build_optimizer(ours, config), torch.optim.SGD(plain, lr=0.1, momentum=0.9)]
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 5, 5)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-6, atol=1e-7)


def test_a_group_with_its_own_decay_keeps_it():
    """As the backbone of RF-DETR has; the rest decays as the configuration shows."""
    model = Layers(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model.parameter_groups = lambda config: [
        {"params": [*model[0].parameters()], "weight_decay": 0.0},
        {"params": [*model[1].parameters()]},
    ]
    groups = build_optimizer(model, TrainConfig(norm_weight_decay=0.2, bias_weight_decay=0.3)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.0), (2, 0.2)]


def test_warm_up_in_epochs_then_no_change():
    config = TrainConfig(lr=1.0, epochs=6, warmup_epochs=1.0, schedule="multistep", milestones=[])
    rates = [learning_rate(step, 600, config) for step in range(600)]
    assert rates[0] == pytest.approx(0.011, abs=1e-3) and rates[98] < 1.0
    assert rates[99:] == [1.0] * 501
    quadratic = dataclasses.replace(config, warmup_shape="quadratic")
    assert learning_rate(49, 600, quadratic) == pytest.approx(0.25)


def test_groups_have_a_learning_rate_of_their_own_that_survives_a_resume():
    model = Layers(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3))
    model.scales = (0.1, None)
    optimizer = build_optimizer(model, TrainConfig())
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05, 0.5, 0.5]
    resumed = build_optimizer(model, TrainConfig())
    resumed.load_state_dict(optimizer.state_dict())
    set_learning_rate(resumed, 0.2)
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([0.02, 0.02, 0.2, 0.2])


@pytest.mark.parametrize(
    ("ramp", "decay_of"),
    [
        ("inverse", lambda step: min(0.9, (1 + step) / (10 + step))),
        # D-FINE, src/optim/ema.py, whose updates count from 1.
        ("exponential", lambda step: 0.9 * (1 - math.exp(-(step + 1) / 20))),
        ("constant", lambda step: 0.9),
    ],
)
def test_the_average_follows_the_formula_and_copies_counters(ramp, decay_of):
    model = torch.nn.BatchNorm2d(2)
    average = MovingAverage(model, 0.9, ramp, 20)
    expected = model.running_mean.clone()
    for step in range(40):
        model.running_mean.fill_(float(step))
        model.num_batches_tracked += 1
        average.update(step)
        decay = decay_of(step)
        expected = decay * expected + (1 - decay) * step
    assert torch.allclose(average.model.running_mean, expected, atol=1e-4)
    assert int(average.model.num_batches_tracked) == 40
    assert not any(p.requires_grad for p in average.model.parameters())
