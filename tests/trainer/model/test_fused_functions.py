"""The choice between compiled and plain, and that both compute the same."""

import logging
import sys

import pytest
import torch

from trainer.model import fused_functions

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    fused_functions.describe_missing_tool("cpu") is not None, reason="no C++ compiler on this machine"
)


@pytest.fixture(autouse=True)
def plain_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    fused_functions.configure(False, CPU)


def test_nothing_is_compiled_unless_asked(caplog):
    caplog.set_level(logging.INFO)
    calls = []
    double = fused_functions.fused(lambda x: calls.append(1) or 2 * x)
    assert not fused_functions.configure(False, CPU)
    assert double(torch.ones(2)).tolist() == [2, 2] and calls == [1]
    assert not caplog.records


def test_a_machine_without_a_compiler_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not fused_functions.configure(True, CPU)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "there is no compiler (g++ or clang++)" in record.message
    assert "install it, or set train.compile=off" in record.message
    monkeypatch.setenv("CXX", "my-own-compiler")
    assert "my-own-compiler" in fused_functions.describe_missing_tool("cpu")
    monkeypatch.delenv("CC", raising=False)
    assert "gcc" in fused_functions.describe_missing_tool("cuda")
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be run
    monkeypatch.setattr(fused_functions.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's headers" in fused_functions.describe_missing_tool("cpu")


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_fails_is_left_out(monkeypatch, tmp_path, caplog):
    from torch._inductor import config as inductor

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    triple = fused_functions.fused(lambda x: (x * 3).sin())
    fused_functions.configure(True, CPU)
    # torch's own way: what monkeypatch undoes is hidden from every later compilation.
    with inductor.patch({"cpp.cxx": (None, str(broken))}):
        assert torch.equal(triple(torch.ones(4)), (torch.ones(4) * 3).sin())
    assert "continuing without compilation" in caplog.text and not fused_functions._CompileState.compiles


def test_more_forms_than_may_be_compiled(caplog):
    """Each number of axes is another form; after some, torch gives up, which is no reason to end a run."""

    def triple(x):
        return (x * 3).sin()

    call = fused_functions.with_eager_fallback(
        torch.compile(triple, backend="eager", dynamic=True, fullgraph=True), triple
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        for axes in range(1, 4):
            values = torch.ones([2] * axes)
            assert torch.allclose(call(values), triple(values))
    assert "continuing without compilation" in caplog.text
