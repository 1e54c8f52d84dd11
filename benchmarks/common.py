"""What the benchmarks share: interleaved timing, batches, and the line that is printed last."""

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
"""What two networks that train alike may differ in."""
_V1_MODEL = {"version", "backbone", "norm"}
"""What torchvision lets one choose besides, for its older network."""


def run(main: Callable[[], None]) -> int:
    """Run a benchmark and return its exit code; our own errors are printed without a traceback."""
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
    parser.add_argument("--rounds", type=int, default=5, help="rounds; every candidate runs once in each")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: the process's own time, where others work too"
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
            fix="run it where there is one, or with --device cpu",
        )
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.device = torch.device(options.device)
    options.compiled = trains and fused_functions.configure(options.compile, options.device)
    return options


def interleaved(
    candidates: dict[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    clock: str = "wall",
    *,
    spare: Collection[str] = (),
) -> Times:
    """Median seconds of each candidate, interleaved so that other load hits all alike, after a warm-up round.

    Candidates of `spare` that do not fit into a GPU's memory are left out.
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
                if name not in spare:
                    raise
                reason = str(error).splitlines()[0]
            else:
                seconds[name] += [took] * bool(round_number)
                continue
            # Only now: as long as the error was there, so were the tensors of what had raised it.
            del seconds[name]
            torch.cuda.empty_cache()
            print(f"left out: {name}, which the memory does not hold: {reason}", flush=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_batch(
    images: int, size: int, classes: int, device: torch.device, *, boxes_each: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]]:
    """uint8 images [B, 3, S, S], boxes [B, M, 4], labels [B, M], and the targets as torchvision's list."""
    corner = torch.rand(images, boxes_each, 2) * size * 0.6
    boxes = torch.cat([corner, corner + size * (0.03 + 0.37 * torch.rand(images, boxes_each, 2))], dim=2)
    labels = torch.randint(0, classes, (images, boxes_each))
    pixels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8)
    pixels, boxes, labels = pixels.to(device), boxes.to(device), labels.to(device)
    lists = [{"boxes": one, "labels": names} for one, names in zip(boxes, labels, strict=True)]
    return pixels, boxes, labels, lists


def stock_model(
    classes: int, size: int, device: torch.device, config: RetinaNetOptions | None = None
) -> torchvision.models.detection.RetinaNet:
    """Torchvision's RetinaNet like `config` (resnet50 v2 by default), random weights, in training mode.

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
            f"torchvision has no RetinaNet like that of this recipe: {', '.join(other)}",
            fix="compare one that it has: coco_r50, openimages_r50, mlperf",
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
    """Bytes that a forward pass keeps for the backward pass, parameters not counted."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # held until all is counted: freed memory would be counted under one address
    del result
    return sum(kept.values())


def report(
    name: str,
    ratio: float,
    figures: dict[str, Any],
    options: argparse.Namespace,
    *,
    at_least: dict[str, float] | None = None,
    at_most: dict[str, float] | None = None,
) -> None:
    """Print the figures, one per line, and then everything as one line of JSON.

    `at_least` and `at_most` are goals by figure; those without a measured figure are left out.
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
    """What a device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} ({len(models) or '?'} cores)"


def _commit() -> str:
    """The commit of the sources, with a plus where they differ from it; empty outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except OSError:
        return ""
