"""The code that a GPU would run, compiled for one that is not there: see support/gpu_compiler.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.data.batch import PADDING
from trainer.model import fused_functions
from trainer.model.retinanet.anchor_matching import match
from trainer.model.retinanet.focal import BACKGROUND, IGNORED

# A minute and a half of a processor, and on a busy machine many times that.
pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """What was compiled for one step, by function and whether it is the backward pass."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torch without triton compiles nothing for GPUs")
    caches = tmp_path_factory.mktemp("caches")
    done = subprocess.run(
        # Such a warning, of which a user can make nothing, has to be kept away.
        [sys.executable, "-W", "error:CUDA_HOME not set", "tests/support/gpu_compiler.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=3500,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        },
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {(each["function"], each["backward"]): each for each in json.loads(done.stdout)}


def test_a_gpus_kernels_of_loss_and_network_can_be_made(graphs):
    both = [("trunk", False), ("trunk", True), ("box_loss", False), ("box_loss", True)]
    assert set(graphs) == {*both, ("_best_overlaps", False), ("focal_and_gradient_", False)}
    assert all(each["assembled"] > 0 for each in graphs.values())


def test_the_focal_loss_is_one_kernel_on_a_gpu(graphs):
    """One pass over the logits, that writes the gradient in their place."""
    assert graphs["focal_and_gradient_", False]["kernels"] == 1


def test_matching_rounds_as_eager_kernels_do(graphs):
    """Each operation by itself, to the nearest, the smallest numbers included (no "ftz"), never fused."""
    matching = graphs["_best_overlaps", False]
    assert matching["kernels"] == matching["assembled"]
    assert matching["arithmetic"] == ["add.rn.f32", "div.rn.f32", "mul.rn.f32", "sub.rn.f32"]
    # Elsewhere it may fuse, and does: the line above says something.
    assert any("fma" in each for each in graphs["focal_and_gradient_", False]["arithmetic"])


def test_nothing_keeps_the_network_from_running_as_cuda_graphs(graphs):
    """Forward and backward pass are one graph each: no part on the CPU, no input changed that moves."""
    for backward in (False, True):
        assert graphs["trunk", backward]["cuda_graphs"] == {
            "parts": 1,
            "reasons_against": [],
            "left_out": False,
            "changed_inputs_that_move": [],
        }
    assert "cuda_graphs" not in graphs["box_loss", False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(
    fused_functions.missing_tool("cuda") is not None, reason="nothing is compiled for GPUs here"
)
@pytest.mark.parametrize(("images", "targets"), [(3, 8), (2, 64), (1, 1024)])
def test_compiled_and_eager_matches_are_equal_to_the_bit(images, targets):
    generator = torch.Generator().manual_seed(targets)
    anchors = random_boxes(50_000, generator)
    # Every other target is an anchor moved by a little: overlaps on both sides of each threshold.
    boxes = torch.stack([random_boxes(targets, generator) for _ in range(images)])
    boxes[:, ::2] = anchors[: targets // 2] + torch.rand(targets // 2, 1, generator=generator) * 12
    labels = torch.randint(PADDING, 3, (images, targets), generator=generator)
    on_device = [each.cuda() for each in (boxes, labels, anchors)]
    eager = match(*on_device)
    try:
        assert fused_functions.choose(True, on_device[0].device)
        compiled = match(*on_device)
        assert fused_functions._Choice.compiles, "the compiler failed"
    finally:
        fused_functions.choose(False, on_device[0].device)
    assert torch.equal(compiled, eager) and torch.equal(compiled.cpu(), match(boxes, labels, anchors))
    assert {BACKGROUND, IGNORED} < set(compiled.unique().tolist())


def random_boxes(count, generator):
    """Boxes in a picture of 800 pixels."""
    corner, size = torch.rand(count, 2, generator=generator) * 700, torch.rand(count, 2, generator=generator)
    return torch.cat([corner, corner + 8 + size * 90], dim=1)
