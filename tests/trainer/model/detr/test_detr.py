"""D-FINE and RT-DETRv2 as detectors. Their losses: test_detr_criterion.py."""

import math

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config.architectures import ARCHITECTURES
from trainer.config.schema import TrainConfig
from trainer.export.formats import OnnxRuntime, to_detections, write_onnx
from trainer.export.verify import EXACT, DetectionComparison
from trainer.model.architecture import build
from trainer.model.deimv2.options import Deimv2Options
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.rfdetr.options import RFDetrOptions

DETRS = [name for name, entry in ARCHITECTURES.items() if entry.extra == "detr"]


def whole_model(detector):
    """transformers' own model with the same weights."""
    model = detector.upstream(detector.library_config)
    report = model.load_state_dict(detector.state_dict(), strict=False)
    assert not report.unexpected_keys and not any("model" in name for name in report.missing_keys)
    return model.to(next(detector.parameters()).dtype).train()


def test_boxes_of_rtdetr_train_the_layer_before(network):
    """As a layer that adds its logits to those of the box before does, whose box is not detached."""
    boxes, moves = (torch.rand(2, 1, 5, 4, dtype=torch.float64) for _ in range(2))
    boxes.requires_grad_()
    gradients = []
    for before in (boxes, boxes.detach()):
        both = torch.cat([boxes, (moves + before.logit()).sigmoid()], dim=1)
        refined = both if before is boxes else network("rtdetr").connect_box_gradients(both)
        (gradient,) = torch.autograd.grad((refined * torch.linspace(-1, 1, 5)[:, None]).sum(), boxes)
        gradients.append((refined.detach(), gradient))
    for expected, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("architecture", DETRS)
def test_every_trained_weight_gets_a_gradient_without_any_box(architecture, network, batch):
    """Ranks exchange gradients of all weights: one that lacks some would let the others wait."""
    detector, sample = network(architecture).train(), batch([0, 0])
    losses = detector(sample.images, sample.boxes, sample.labels, context=sample.context())
    assert losses["bbox"].item() == 0 and losses[detector.loss_names[0]].item() > 0
    sum(losses.values()).backward()
    lacking = [n for n, p in detector.named_parameters() if p.requires_grad and p.grad is None]
    assert not lacking


# transformers' DEIMv2 differs from the authors' (deimv2/deimv2.py): see test_detr_layouts.py.
@pytest.mark.parametrize("architecture", [name for name in DETRS if name != "deimv2"])
def test_detections_are_those_of_transformers(architecture, network, batch):
    detector, sample = network(architecture, score_threshold=0.0).eval(), batch([1, 1])
    theirs = whole_model(detector).eval()
    with torch.no_grad():
        expected = theirs(pixel_values=detector.normalize(sample.images))
    detections = detector.predict(sample.images)
    flat = expected.logits.sigmoid().flatten(1)
    torch.testing.assert_close(detections.scores, flat.topk(detections.scores.shape[1]).values)
    for row in range(2):
        for box, score, label in zip(*(part[row, :5] for part in detections[:3]), strict=True):
            query = (expected.logits[row, :, label].sigmoid() - score).abs().argmin()
            x, y, width, height = expected.pred_boxes[row, query].tolist()
            sides = torch.tensor([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
            torch.testing.assert_close(box, sides.clamp(0, 1) * 128, rtol=1e-3, atol=1e-2)
    assert (detections.num == detections.scores.shape[1]).all()


def test_detections_below_the_threshold_are_padding(network, batch):
    detector = network("dfine", score_threshold=0.0).eval()
    images = batch([1, 1]).images
    scores = detector.predict(images).scores.flatten().sort(descending=True).values
    limited = network("dfine", score_threshold=scores[3:5].mean().item()).eval().predict(images)
    assert limited.num.sum() == 4
    for row, count in enumerate(limited.num.tolist()):
        assert (limited.labels[row, :count] >= 0).all() and (limited.labels[row, count:] == -1).all()
        assert not limited.boxes[row, count:].any() and not limited.scores[row, count:].any()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_trains_under_autocast(precision, network, batch):
    detector, sample = network("dfine").train(), batch([3, 1])
    exact = detector(sample.images, sample.boxes, sample.labels, context=sample.context())
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        losses = detector(sample.images, sample.boxes, sample.labels, context=sample.context())
    sum(losses.values()).backward()
    for name, loss in losses.items():
        assert loss.dtype == torch.float32
        # Weights drawn at random have errors of 5 % in the middle, and of 20 % at times.
        assert loss.item() == pytest.approx(exact[name].item(), rel=0.3, abs=0.02), name
    assert all(p.grad.isfinite().all() for p in detector.parameters() if p.requires_grad)


def test_the_backbone_has_a_learning_rate_of_its_own(network):
    detector = network("dfine", backbone_lr=0.25, frozen_stem=True, frozen_norm=True)
    groups = detector.parameter_groups(TrainConfig(weight_decay=0.1))
    backbone = {id(p) for p in detector.model.backbone.parameters() if p.requires_grad}
    slow = {id(p) for group in groups if group.get("lr_scale") == 0.25 for p in group["params"]}
    every = [id(p) for group in groups for p in group["params"]]
    assert slow == backbone and slow
    trained = {id(p) for p in detector.parameters() if p.requires_grad}
    assert len(every) == len(set(every)) and set(every) == trained
    assert not any("embedder" in n for n, p in detector.named_parameters() if p.requires_grad)


MILLIONS = {"n": 3.8, "s": 10.3, "m": 19.6, "l": 31.2, "x": 62.7}
"""Weights of the published sizes: 4, 10, 19, 31 and 62 million (D-FINE's README)."""
RESNETS = {"r18": 20.2, "r34": 31.4, "r50": 42.9, "r101": 76.6}
"""RT-DETRv2's README: 20, 31, 42 and 76 million."""
GROUPS = {
    "rfdetr nano": 30.5, "rfdetr small": 32.1, "rfdetr medium": 33.7, "rfdetr large": 33.9,
    "deimv2 atto": 0.5, "deimv2 femto": 1.0, "deimv2 pico": 1.5,
    "deimv2 n": 3.6, "deimv2 s": 9.8, "deimv2 m": 18.4, "deimv2 l": 32.5, "deimv2 x": 51.2,
}  # fmt: skip
"""The READMEs' numbers; of DEIMv2's last four, which the README gives for networks with joined convolutions
(9.7, 18.1, 32.2, 50.3), what its code builds."""


@pytest.mark.parametrize(
    "options",
    [
        *(DFineOptions(size=size) for size in ("n", "s", "m", "l", "x")),
        *(RTDetrOptions(size=size) for size in ("r18", "r34", "r50", "r101")),
        *(RFDetrOptions(size=size) for size in ("nano", "small", "medium", "large")),
        *(Deimv2Options(size=size) for size in ("atto", "femto", "pico", "n", "s", "m", "l", "x")),
    ],
    ids=lambda options: f"{options.architecture} {options.size}",
)
def test_sizes_are_the_published_ones(options):
    with torch.device("meta"):
        detector = build(options, 80)
    count = sum(p.numel() for p in detector.parameters()) / 1e6
    expected = GROUPS.get(f"{options.architecture} {options.size}") or (MILLIONS | RESNETS)[options.size]
    assert count == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("architecture", DETRS)
def test_the_graph_gives_what_the_network_predicts(architecture, network, batch):
    made, images = network(architecture, score_threshold=0.0).deployment_graph(128), batch([1, 1]).images
    assert made.rows == 90 and made.image_size == 128
    with torch.no_grad():
        outputs = made(images)
    for ours, theirs in zip(made.detector.predict(images), outputs, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name == "dfine" else pytest.mark.extra) for name in DETRS]
)
def test_the_raw_graph_has_no_grid_sample_and_finds_what_the_detector_finds(
    network, batch, architecture, tmp_path
):
    made, images = network(architecture, score_threshold=0.0), batch([1, 1]).images
    for name, parameter in made.named_parameters():
        if name.endswith("lab.bias"):
            parameter.data -= 0.2  # Negative values at the edges, where HGNetV2's stem pads with zeros.
    expected = made.eval().predict(images)
    graph = made.fold_batchnorm().raw_graph(128)
    write_onnx(graph, tmp_path / "raw.onnx", grid_sample=False)
    assert "GridSample" not in {node.op_type for node in onnx.load(tmp_path / "raw.onnx").graph.node}
    boxes, scores = map(torch.from_numpy, OnnxRuntime(tmp_path / "raw.onnx").run(images.numpy()))
    assert boxes.shape == (2, 30, 4) and scores.shape == (2, 30, 3)
    comparison = DetectionComparison(EXACT)
    comparison.add(expected, to_detections(boxes, scores, made.thresholds))
    assert comparison.result().matched == 1


class Shapes(TorchDispatchMode):
    """Notes each operator with the shapes that it gets."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [part for part in pytree.tree_leaves(args) if isinstance(part, torch.Tensor)]
        self.seen.append((str(function), [tuple(part.shape) for part in tensors]))
        return function(*args, **(kwargs or {}))


def padded(sample):
    """As many rows of targets as an image with twelve has."""
    extra = 12 - max(sample.counts)
    labels = F.pad(sample.labels, (0, extra), value=-1)
    return sample._replace(boxes=F.pad(sample.boxes, (0, 0, 0, extra)), labels=labels)


def train_on(detector, sample):
    """The losses of a batch, after a backward pass."""
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector(sample.images, sample.boxes, sample.labels, context=sample.context())
    sum(losses.values()).backward()
    return [loss.item() for loss in losses.values()]


COUNTS = [1, 1, 1], [3, 0, 5], [1, 12, 2]


@pytest.mark.parametrize("architecture", ["dfine", "rtdetr", "rfdetr"])
def test_no_shape_depends_on_the_targets(architecture, network, batch):
    """As CUDA graphs need it; the rows of the targets are a multiple of 16."""
    detector, seen = network(architecture).train(), []
    for counts in COUNTS:
        sample = padded(batch(counts))
        with Shapes() as shapes:
            train_on(detector, sample)
        seen.append(shapes.seen)
    # The first step also makes constants.
    assert len(seen[1]) > 500 and seen[1] == seen[2]


SMALL = {
    "dfine": DFineOptions(size="n", width=0.5, queries=30, denoising=20),
    "rtdetr": RTDetrOptions(size="r18", width=0.25, queries=30, denoising=20),
}


@pytest.fixture(params=SMALL)
def fresh(request):
    """A detector as a training from scratch begins with it."""
    torch.manual_seed(0)
    return build(SMALL[request.param], 3).train()


def linear(detector):
    return {
        name: module
        for name, module in detector.model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("backbone")
    }


def test_layers_pass_on_what_they_get(fresh):
    """transformers' deviation of 0.01 would make each of them a tenth as loud as its input."""
    zero = []
    for name, layer in linear(fresh).items():
        draw = torch.randn(2000, layer.in_features)
        with torch.no_grad():
            loudness = (nn.functional.linear(draw, layer.weight)).std().item()
        if loudness == 0:
            zero.append(name)
        else:
            assert 0.2 < loudness < 2.5, (name, loudness)
    # What leaves boxes and scores as they are at first, and what transformers makes so as well.
    ends = ("sampling_offsets", "attention_weights", "gate")
    heads = {name for name in zero if not name.endswith(ends)}
    assert heads and all("bbox" in name or "reg_conf" in name for name in heads)


def test_nothing_is_found_and_boxes_are_those_of_their_places(fresh, batch):
    sample = batch([3, 1])
    with torch.no_grad():
        outputs = fresh.outputs(fresh.normalize(sample.images), None)
    for logits in (outputs.logits, outputs.encoder_logits):
        assert logits.mean().item() == pytest.approx(-math.log(99), abs=0.7)
    # Places of the finest level are a twentieth, of the next a tenth, of one after it a fifth.
    sides = outputs.encoder_boxes[..., 2:]
    assert all(min(abs(side - size) for size in (0.05, 0.1, 0.2)) < 1e-4 for side in sides.flatten().tolist())
