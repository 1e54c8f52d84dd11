"""What the settings of compilation and of messages do in the loop."""

import sys

import pytest
import torch
from steps import steps_of

from trainer.launching.distributed import SINGLE, World
from trainer.model import fused_functions
from trainer.model.architecture import build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training.step import compile_detector

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIRST_GPU = World(0, 1, torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Compilation that leaves nothing behind for other tests."""
    monkeypatch.setattr(fused_functions._CompileState, "compiles", False)
    yield
    if "torch._dynamo" in sys.modules:  # which takes seconds to import
        torch.compiler.reset()


def gradients_of(config, shards, output, world, count):
    """Sums of some steps, and the gradients that the optimizer saw."""
    losses, gradients = [], []
    with steps_of(config, shards, output, world) as (run, step):
        run.state.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(torch.cat([p.grad.flatten().float() for p in run.state.parameters]))
        )
        for _ in range(count):
            losses.append(step())
        assert run.keeps_gradients == (config.train.compile == "graphs" and run.loader.pass_count > 1)
    return torch.stack(losses), torch.stack(gradients)


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.01), ("bf16", 0.1)])
def test_the_network_as_cuda_graphs_trains_alike(
    passes, precision, tolerance, shards, tiny, tmp_path, monkeypatch
):
    """Six steps, in which the graphs are warmed up, recorded and replayed.

    Of a thousand places rounding moves one or two over the edge of a ReLU, which is the tolerance in fp32.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    common = {
        "train__precision": precision, "train__batch_size": 2, "train__global_batch": 2 * passes,
        "train__lr": 1e-6, "train__clip_norm": 0.0,
    }  # fmt: skip
    plain, compiled = (
        gradients_of(tiny(**common, train__compile=setting), shards, str(tmp_path / setting), FIRST_GPU, 6)
        for setting in ("off", "graphs")
    )
    assert fused_functions._CompileState.compiles  # no compiler's failure ended it
    for one, other in zip(plain, compiled, strict=True):
        assert torch.isfinite(one).all() and one.abs().amax(dim=1).min() > 0
        difference = (one - other).norm(dim=1) / one.norm(dim=1)
        assert difference.max() < tolerance, difference


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("setting", ["off", "loss", "graphs"])
def test_the_host_waits_for_nothing_in_a_step_on_a_gpu(setting, passes, shards, tiny, tmp_path):
    """The loader's part included; compiling, tuning and recording of graphs are over before it."""
    config = tiny(train__compile=setting, train__batch_size=2, train__global_batch=2 * passes)
    with steps_of(config, shards, str(tmp_path), FIRST_GPU) as (_, step):
        for _ in range(8):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(), step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert fused_functions._CompileState.compiles == (setting != "off")


NARROW = RetinaNetOptions(backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1)


def tiny_detector():
    torch.manual_seed(0)
    return build(NARROW, 3).train()


@pytest.fixture
def traced(monkeypatch):
    """Tracing alone: what a backend then makes of the graph is torch's part."""
    calls, compile_ = [], torch.compile

    def trace(function, **options):
        calls.append(options)
        options.pop("mode")
        return compile_(function, backend="eager", **options)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(fused_functions, "configure", lambda enabled, device, log_result: enabled)
    return calls


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_each_size_of_the_square_has_a_graph_for_each_share_and_no_more(caplog):
    """Where torch would give up after two: two sizes, each with two numbers of images."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.utils.counters.clear()
    detector = tiny_detector()
    boxes, labels = torch.tensor([[[10.0, 10.0, 60.0, 70.0]]]), torch.tensor([[1]])
    try:
        torch._dynamo.config.recompile_limit = 2
        compile_detector(detector, "model", SINGLE, sizes=2)
        with torch.no_grad():
            for size in (96, 128, 96, 128):
                for count in (1, 2):
                    images = torch.zeros((count, 3, size, size), dtype=torch.uint8)
                    detector(images, boxes.expand(count, -1, -1), labels.expand(count, -1))
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert "continuing without compilation" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "device", "modes", "graphs"),
    [
        ("off", "cuda", [], False), ("loss", "cuda", [], False), ("model", "cuda", ["default"], False),
        ("graphs", "cuda", ["reduce-overhead"], True), ("graphs", "cpu", ["default"], False),
    ],
)  # fmt: skip
def test_the_network_is_compiled_as_asked(setting, device, modes, graphs, monkeypatch):
    """In torch's mode "reduce-overhead", which is that of CUDA graphs, where there is a GPU for them."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append((function, options)))
    monkeypatch.setattr(fused_functions, "describe_missing_tool", lambda device_type: None)
    monkeypatch.setattr(fused_functions._CompileState, "compiles", False)
    detector = tiny_detector()
    assert compile_detector(detector, setting, World(0, 1, torch.device(device))) == graphs
    assert calls == [(detector.run_trunk, {"mode": m, "dynamic": False, "fullgraph": True}) for m in modes]
    assert (detector._compiled_trunk is not None) == bool(modes)
    assert fused_functions._CompileState.compiles == (setting != "off")
