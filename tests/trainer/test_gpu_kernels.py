"""The code that a GPU would run, compiled for one that is not there: see support/gpu_compiler.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A minute and a half of a processor, and on a busy machine several times that.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """What was compiled for one step, by function and whether it is the backward pass."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torch without triton compiles nothing for GPUs")
    caches = tmp_path_factory.mktemp("caches")
    done = subprocess.run(
        [sys.executable, "tests/support/gpu_compiler.py"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return {(each["function"], each["backward"]): each for each in json.loads(done.stdout)}


def test_a_gpus_kernels_of_loss_and_network_can_be_made(graphs):
    both = [("trunk", False), ("trunk", True), ("box_loss", False), ("box_loss", True)]
    assert set(graphs) == {*both, ("focal_and_gradient_", False)}
    assert all(each["assembled"] > 0 for each in graphs.values())


def test_the_focal_loss_is_one_kernel_on_a_gpu(graphs):
    """One pass over the logits, that writes the gradient in their place."""
    assert graphs["focal_and_gradient_", False]["kernels"] == 1


def test_nothing_keeps_the_network_from_running_as_cuda_graphs(graphs):
    """Forward and backward pass are one graph each: no part on the CPU, no input changed that moves."""
    for backward in (False, True):
        assert graphs["trunk", backward]["cuda_graphs"] == {
            "parts": 1, "reasons_against": [], "left_out": False, "changed_inputs_that_move": []
        }  # fmt: skip
    assert "cuda_graphs" not in graphs["box_loss", False]
