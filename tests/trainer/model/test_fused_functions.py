"""The choice between compiled and plain, and that both compute the same."""

import logging
import sys

import pytest
import torch

from trainer.model import fused_functions
from trainer.model.anchor_matching import assign, match
from trainer.model.focal import focal_and_gradient_
from trainer.model.loss import box_loss

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    fused_functions.missing_tool("cpu") is not None, reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def plain_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    fused_functions.choose(False, CPU)


def test_nothing_is_compiled_unless_asked(caplog):
    caplog.set_level(logging.INFO)
    calls = []
    double = fused_functions.fused(lambda x: calls.append(1) or 2 * x)
    assert not fused_functions.choose(False, CPU)
    assert double(torch.ones(2)).tolist() == [2, 2] and calls == [1]
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.message.startswith("computing without compilation")
    fused_functions.choose(False, CPU, tell=False)
    assert len(caplog.records) == 1


def test_a_machine_without_a_compiler_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not fused_functions.choose(True, CPU)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "there is no compiler (g++ or clang++)" in record.message
    assert "install it, or set train.compile=off" in record.message
    monkeypatch.setenv("CXX", "my-own-compiler")
    assert "my-own-compiler" in fused_functions.missing_tool("cpu")
    monkeypatch.delenv("CC", raising=False)
    assert "gcc" in fused_functions.missing_tool("cuda")
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be run
    monkeypatch.setattr(fused_functions.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's headers" in fused_functions.missing_tool("cpu")


def random_targets():
    torch.manual_seed(0)
    corner = torch.cartesian_prod(torch.arange(0, 120, 5.0), torch.arange(0, 120, 5.0))
    anchors = torch.cat([torch.cat([corner, corner + side], dim=1) for side in (8, 16, 32, 50)])
    corner = torch.rand(3, 64, 2) * 90
    boxes = torch.cat([corner, corner + 2 + torch.rand(3, 64, 2) * 40], dim=2)
    boxes[0, 5] = boxes[0, 9] = anchors[100]
    labels = torch.randint(-1, 4, (3, 64))
    labels[1] = -1
    return anchors, boxes, labels


@pytest.mark.slow
@pytest.mark.extra
@needs_compiler
def test_compiled_and_plain_agree(caplog):
    caplog.set_level(logging.INFO)
    anchors, boxes, labels = random_targets()
    matches = assign(boxes, labels, anchors)
    offsets = (torch.randn(3, len(anchors), 4) * 0.3).requires_grad_()
    logits = [torch.randn(500, classes) * 4 - 2 for classes in (3, 91)]
    rows = torch.randint(-1, 3, (500,), dtype=torch.int32)

    def everything():
        parts = [match(boxes, labels, anchors)]
        for kind in ("giou", "l1", "smooth_l1"):
            loss = box_loss(offsets, kind, anchors, matches)
            parts += [loss.detach(), *torch.autograd.grad(loss, offsets)]
        for one in logits:
            gradient = one.clone()
            parts += [focal_and_gradient_(gradient, rows, torch.rand(500).round()), gradient]
        return parts

    torch.manual_seed(1)
    plain = everything()
    assert fused_functions.choose(True, CPU)
    assert "compiles the loss for the CPU" in caplog.text
    torch.manual_seed(1)
    compiled = everything()
    assert fused_functions._Choice.compiles, "the compiler failed"
    assert torch.equal(plain[0], compiled[0])
    for one, other in zip(plain[1:], compiled[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_fails_is_left_out(monkeypatch, tmp_path, caplog):
    from torch._inductor import config as inductor

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    triple = fused_functions.fused(lambda x: (x * 3).sin())
    fused_functions.choose(True, CPU)
    # torch's own way: what monkeypatch undoes is hidden from every later compilation.
    with inductor.patch({"cpp.cxx": (None, str(broken))}):
        assert torch.equal(triple(torch.ones(4)), (torch.ones(4) * 3).sin())
    assert "going on uncompiled" in caplog.text and not fused_functions._Choice.compiles


@pytest.mark.slow
def test_the_reason_of_a_failure_is_told(caplog):
    """torch's first line says only whose failure it is, and its last ones whom else to ask."""

    def broken(graph, inputs):
        raise OSError("no space left\nfor the cache")

    def double(x):
        return 2 * x

    call = fused_functions.guarded(torch.compile(double, backend=broken), double)
    assert call(torch.ones(2)).tolist() == [2, 2] and call(torch.ones(3)).tolist() == [2, 2, 2]
    (record,) = [each for each in caplog.records if each.name == "compile"]
    assert record.message.endswith("the compiler failed: backend='broken' raised: OSError: no space left")


def test_more_forms_than_may_be_compiled(caplog):
    """Each number of axes is another form; after some, torch gives up, which is no reason to end a run."""

    def triple(x):
        return (x * 3).sin()

    call = fused_functions.guarded(
        torch.compile(triple, backend="eager", dynamic=True, fullgraph=True), triple
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        for axes in range(1, 4):
            values = torch.ones([2] * axes)
            assert torch.allclose(call(values), triple(values))
    assert "going on uncompiled" in caplog.text
