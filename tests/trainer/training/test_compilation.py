"""The compilation of the network, and the cache of compiled code."""

import pytest
import torch

from trainer.launching.distributed import SINGLE, World
from trainer.model import fused_functions
from trainer.model.architecture import build
from trainer.model.architectures.retinanet.retinanet_options import RetinaNetOptions
from trainer.training.loop import load_compiled
from trainer.training.step import compile_detector

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
    monkeypatch.setattr(fused_functions, "choose", lambda enabled, device, tell: enabled)
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
    assert "going on uncompiled" not in caplog.text


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
    monkeypatch.setattr(fused_functions, "missing_tool", lambda device_type: None)
    monkeypatch.setattr(fused_functions._Choice, "compiles", False)
    detector = tiny_detector()
    assert compile_detector(detector, setting, World(0, 1, torch.device(device))) == graphs
    assert calls == [(detector.trunk, {"mode": m, "dynamic": False, "fullgraph": True}) for m in modes]
    assert (detector._compiled_trunk is not None) == bool(modes)
    assert fused_functions._Choice.compiles == (setting != "off")


def test_compiled_code_of_another_torch_is_not_used(tmp_path, caplog):
    (tmp_path / "compiled.bin").write_bytes(b"of another torch")
    assert not load_compiled(str(tmp_path / "compiled.bin"))
    assert "compiling again" in caplog.text


@pytest.mark.slow
def test_a_network_that_cannot_be_compiled_goes_on_as_it_is(monkeypatch, caplog):
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, mode, **options: compile_(function, backend=broken, **options)
    )
    monkeypatch.setattr(fused_functions, "choose", lambda enabled, device, tell: enabled)
    detector = tiny_detector()
    images = torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8)
    boxes, labels = torch.tensor([[[10.0, 10.0, 60.0, 70.0]]]), torch.tensor([[1]])
    plain = detector(images, boxes, labels)
    compile_detector(detector, "model", SINGLE)
    for _ in range(2):
        assert detector(images, boxes, labels) == plain
    assert caplog.text.count("going on uncompiled, the compiler failed: backend=") == 1
