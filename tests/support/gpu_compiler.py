"""What Inductor and Triton make of a training step for an H200, on a machine without a GPU.

    python tests/support/gpu_compiler.py    # prints a list in JSON, an object for each graph

The step runs on the CPU. Each graph that torch.compile takes from it is moved to a GPU that is not there,
and goes all the way to machine code: Triton's compiler and NVIDIA's assembler need no GPU. Nothing of it
is run. What stands in for the GPU are its properties, as Inductor asks for them. To be run as a process
of its own, for torch remembers what it was told.
"""

import contextlib
import copy
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._inductor
import triton
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, output_code
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget

from trainer.launching.distributed import World
from trainer.model import fused_functions
from trainer.model.architecture import build
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training.step import compile_detector

GPU = torch.device("cuda", 0)
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=141 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    L2_cache_size=50 * 2**20,
)
_COMPILE = torch.compile
_ARITHMETIC = re.compile(r"\b(?:add|sub|mul|div|rcp|fma|mad|ex2|lg2|sqrt|rsqrt)\S*\.f32\b")
"""Instructions that round, in the assembler's language for NVIDIA's GPUs (PTX)."""
NARROW = RetinaNetOptions(
    backbone="resnet18", backbone_width=16, fpn_channels=32, head_depth=1, trainable_layers=1
)


class Compiler:
    """A backend of torch.compile that runs graphs on the CPU and compiles them for the GPU."""

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []
        """Of each graph, in the order of compilation: see `_both`, `_assemble` and `_partitions`."""
        self._assembled: set[str] = set()

    def both(self, function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
        """What takes the place of torch.compile."""
        mode, options = given.pop("mode", None), given.pop("options", None)
        patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
            name = function.__name__
            return compile_fx.compile_fx(
                graph, inputs, lambda *args, **kwargs: self._both(name, *args, **kwargs), patches
            )

        return _COMPILE(function, backend=backend, **given)

    def _both(
        self, name: str, graph: fx.GraphModule, inputs: list[Any], **options: Any
    ) -> Callable[[list[Any]], Any]:
        here = copy.deepcopy(graph)
        self.graphs.append(
            {
                "function": name,
                "backward": bool(options.get("is_backward")),
                "kernels": 0,
                "assembled": 0,
                "arithmetic": [],
            }
        )
        compile_fx.compile_fx_inner(*_moved(graph, inputs), **options)

        def run(arguments: list[Any]) -> Any:
            result = here(*arguments)
            arguments.clear()
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def assemble(self, kernel: CachingAutotuner, *_: Any, **__: Any) -> None:
        """Make machine code of a kernel, in its first form, unless its operations have some already."""
        graph = self.graphs[-1]
        graph["kernels"] += 1
        operations = re.sub(r"_\d+$", "", kernel.inductor_meta["kernel_name"])
        if operations in self._assembled:
            return
        self._assembled.add(operations)
        kernel.configs = kernel.configs[:1]
        kernel._precompile_worker()
        (result,) = kernel.compile_results
        assert (
            result.kernel.asm["cubin"] and result.kernel.metadata.shared <= H200.shared_memory_per_block_optin
        )
        graph["assembled"] += 1
        graph["arithmetic"] = sorted({*graph["arithmetic"], *_ARITHMETIC.findall(result.kernel.asm["ptx"])})

    def partitions(self, inputs: Any, compiled: output_code.CompiledFxGraph, graphs: Any, *_: Any) -> None:
        """Note what would run as CUDA graphs, and what stands against it."""
        moving = set(compiled.mutated_input_idxs) - set(compiled.fx_kwargs["static_input_idxs"])
        self.graphs[-1]["cuda_graphs"] = {
            "parts": len(compiled.partition_maps or ()),
            "reasons_against": list(compiled.cudagraph_info.cudagraph_fail_reasons),
            # Which torch 2.11 does not tell.
            "left_out": getattr(compiled, "has_uncaptured_partition", False),
            "changed_inputs_that_move": sorted(moving),
        }


def _moved(graph: fx.GraphModule, inputs: list[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A graph and its inputs, on the GPU."""

    def there(value: Any) -> Any:
        return GPU if isinstance(value, torch.device) else value

    for node in graph.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(part, there) for part in (node.args, node.kwargs))
    graph.recompile()
    mode = detect_fake_mode(inputs)

    def moved(x: Any) -> Any:
        # A number of Python's is handed to a kernel from the host.
        if not torch.is_tensor(x) or (x.dim() == 0 and x.dtype == torch.float64):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU)

    with mode:
        inputs = [moved(x) for x in inputs]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    return graph, inputs


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


@contextlib.contextmanager
def pretended(compiler: Compiler) -> Iterator[None]:
    """An H200 for torch.compile to compile for, and `compiler` in its place."""
    suggest, norm = torch._C._select_conv_backend, torch.nn.functional.group_norm
    triton.runtime.driver.set_active(
        types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    )
    answers = {
        "device_count": 1, "current_device": 0, "is_available": True, "get_device_properties": H200,
        "get_compute_capability": 90, "is_bf16_supported": True, "synchronize": None,
    }  # fmt: skip
    replaced = [(CudaInterface, name, staticmethod(_always(value))) for name, value in answers.items()]
    replaced += [
        (torch, "compile", compiler.both),
        (torch.cuda, "get_device_properties", _always(H200)),
        (torch.cuda, "get_device_capability", _always((9, 0))),
        (torch.cuda, "device_count", _always(1)),
        (torch.cuda, "current_device", _always(0)),
        # Without a driver torch believes that there is no cuDNN, and gives another memory format.
        (
            torch._C,
            "_select_conv_backend",
            lambda *a, **k: torch._C._ConvBackend.Cudnn if (*a, *k.values())[0].is_cuda else suggest(*a, **k),
        ),
        # The autocast of GPUs does so, that of CPUs does not.
        (torch.nn.functional, "group_norm", lambda x, *a, **k: norm(x.float(), *a, **k)),
        (triton_helpers, "set_driver_to_gpu", _always(None)),
        (CachingAutotuner, "precompile", lambda *a, **k: compiler.assemble(*a, **k)),
        (output_code, "cudagraph_partition_post_compile", compiler.partitions),
        (fused_functions, "missing_tool", _always(None)),
        # A compiler's failure is to be seen, not to be lived with.
        (fused_functions, "guarded", lambda compiled, function: compiled),
    ]
    settings = {
        "compile_threads": 1, "fx_graph_cache": False, "use_static_triton_launcher": False,
        # Else it builds and loads a library for each set of vector instructions of this processor.
        "cpp.vec_isa_ok": False,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch._inductor.config.patch(settings))
        stack.enter_context(torch._functorch.config.patch({"enable_autograd_cache": False}))
        yield


def main() -> None:
    """One step of a narrow detector, all of it compiled."""
    compiler = Compiler()
    detector = build(NARROW, 5).train().to(memory_format=torch.channels_last)
    images = torch.zeros(2, 3, 128, 128, dtype=torch.uint8)
    boxes, labels = torch.tensor([[[10.0, 10.0, 60.0, 70.0]]]).repeat(2, 1, 1), torch.ones(2, 1).long()
    with pretended(compiler), torch.autocast("cpu", torch.bfloat16):
        compile_detector(detector, "graphs", World(0, 1, GPU))
        losses = detector(images, boxes, labels)
        sum(losses.values()).backward()
    assert fused_functions._Choice.compiles and all(
        p.grad is not None for p in detector.parameters() if p.requires_grad
    )
    json.dump(compiler.graphs, sys.stdout)


if __name__ == "__main__":
    main()
