"""Shared code of the benchmarks: options, interleaved timing, random batches, the report."""

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torchvision
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.ops.misc import FrozenBatchNorm2d

from trainer.base import log
from trainer.base.errors import ConfigError, KubedetError
from trainer.launching.worker_failures import report_error
from trainer.model import fused_functions
from trainer.model.retinanet.backbone import freeze
from trainer.model.retinanet.options import RetinaNetOptions

Times = dict[str, float]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_ANY_MODEL = {
    "weights", "score_threshold", "nms_threshold", "detections_per_image",
    "trainable_layers", "sync_batchnorm",
}  # fmt: skip
"""Options in which two networks may differ without training differently."""
_V1_MODEL = {"version", "backbone", "norm"}
"""Further options that torchvision supports, for its older network."""


def run(main: Callable[[], None]) -> int:
    """Run a benchmark and return its exit code; print a KubedetError without a traceback."""
    try:
        main()
    except KubedetError as error:
        report_error(error)
        return error.exit_code
    return 0


def arguments(description: str | None, *, trains: bool = False, **defaults: Any) -> argparse.Namespace:
    """Parse the options of a benchmark and prepare the process.

    Args:
        description: help text.
        trains: add --compile.
        defaults: further options and their defaults; a tuple holds choices, the first is the default.

    Raises:
        ConfigError: there is no GPU for `--device cuda`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each runs every candidate once")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: CPU time of the process, for a busy machine"
    )
    if trains:
        parser.add_argument(
            "--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the loss"
        )
    for name, value in defaults.items():
        choices = value if isinstance(value, tuple) else None
        first = choices[0] if choices else value
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(first), default=first, choices=choices, help=" "
        )
    options = parser.parse_args()
    log.setup()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {options.device}: torch {torch.__version__} finds no GPU on this machine",
            fix="run it on a machine with a GPU, or with --device cpu",
        )
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.device = torch.device(options.device)
    options.compiled = trains and fused_functions.configure(options.compile, options.device)
    return options


def time_interleaved(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    clock: str = "wall",
    *,
    optional: Collection[str] = (),
) -> Times:
    """Return the median seconds of each candidate, after a warm-up round.

    Candidates are interleaved, so other load affects all equally. `optional` ones are skipped if they do not
    fit into the GPU's memory.
    """
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name in list(seconds):
            synchronize(device)
            start = now()
            try:
                candidates[name]()
                synchronize(device)
                took = now() - start
            except torch.OutOfMemoryError as error:
                if name not in optional:
                    raise
                reason = str(error).splitlines()[0]
            else:
                seconds[name] += [took] * bool(round_number)
                continue
            # Not in the except block, where the error still refers to the tensors.
            del seconds[name]
            torch.cuda.empty_cache()
            print(f"skipped: {name} does not fit into memory: {reason}", flush=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_batch(
    images: int, size: int, classes: int, device: torch.device, *, boxes_each: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Return uint8 images [B, 3, S, S], boxes [B, M, 4], labels [B, M], and torchvision's list of targets."""
    corner = torch.rand(images, boxes_each, 2) * size * 0.6
    boxes = torch.cat([corner, corner + size * (0.03 + 0.37 * torch.rand(images, boxes_each, 2))], dim=2)
    labels = torch.randint(0, classes, (images, boxes_each))
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8)
    pixels, boxes, labels = pixels.to(device), boxes.to(device), labels.to(device)
    lists = [{"boxes": rows, "labels": names} for rows, names in zip(boxes, labels, strict=True)]
    return pixels, boxes, labels, lists


def stock_model(
    classes: int, size: int, device: torch.device, config: RetinaNetOptions | None = None
) -> torchvision.models.detection.RetinaNet:
    """Return torchvision's RetinaNet with the options of `config`, random weights, in training mode.

    Raises:
        ConfigError: torchvision has no such network.
    """
    detection = torchvision.models.detection
    config = config or RetinaNetOptions()
    free = _ANY_MODEL | (_V1_MODEL if config.version == "v1" and config.norm != "group" else set())
    other = [
        f"model.{part.name}"
        for part in dataclasses.fields(RetinaNetOptions)
        if part.name not in free and getattr(config, part.name) != getattr(RetinaNetOptions(), part.name)
    ]
    if other:
        raise ConfigError(
            f"torchvision's RetinaNet does not support these options of the recipe: {', '.join(other)}",
            fix="use one of the recipes coco_r50, openimages_r50, mlperf",
        )
    if config.version == "v2":
        model = detection.retinanet_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=classes)
        freeze(model.backbone.body, config.trainable_layers)
    else:
        norm = FrozenBatchNorm2d if config.norm == "frozen" else torch.nn.BatchNorm2d
        backbone = detection.backbone_utils.resnet_fpn_backbone(
            backbone_name=config.backbone,
            weights=None,
            norm_layer=norm,
            trainable_layers=config.trainable_layers,
            returned_layers=[2, 3, 4],
            extra_blocks=LastLevelP6P7(256, 256),
        )
        model = detection.RetinaNet(backbone, classes)
    model.transform.min_size, model.transform.max_size = (size,), size
    return model.to(device).train()


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass saves for the backward pass, without parameters."""
    sizes: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        result = forward()  # kept until all sizes are recorded, so no address is reused
    del result
    return sum(sizes.values())


def report(
    name: str,
    ratio: float,
    figures: dict[str, Any],
    options: argparse.Namespace,
    *,
    at_least: dict[str, float] | None = None,
    at_most: dict[str, float] | None = None,
) -> None:
    """Print the figures, one per line, then the whole result as one line of JSON.

    `at_least` and `at_most` are goals by figure; goals of figures that were not measured are ignored.
    """
    goals = [
        {"figure": key, "goal": f"{sign} {limit:g}", "reached": bool(figures[key] * way >= limit * way)}
        for sign, way, limits in ((">=", 1, at_least or {}), ("<=", -1, at_most or {}))
        for key, limit in limits.items()
        if key in figures
    ]
    for key, value in figures.items():
        print(f"{name}  {key:<40} {value:.4g}" if isinstance(value, float) else f"{name}  {key:<40} {value}")
    print(
        json.dumps(
            {
                "name": name,
                "ratio": round(ratio, 3),
                "figures": {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()},
                "goals": goals,
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "torchvision": torchvision.__version__,
                },
                "device": device_name(options.device),
                "threads": options.threads,
                "clock": options.clock,
                "compiled": options.compiled,
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "commit": _commit(),
                "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
            }
        )
    )


def device_name(device: torch.device) -> str:
    """Return the model name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} ({len(models) or '?'} cores)"


def _commit() -> str:
    """Return the commit, with a plus if files were changed; "" outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except OSError:
        return ""
