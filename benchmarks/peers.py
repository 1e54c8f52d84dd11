"""Compare AP after equal CPU time from random weights: `small`, Ultralytics' YOLO11n, torchvision.

    python -m benchmarks.peers --output compared                                    # on the built-in sample
    python -m benchmarks.peers --source voc:PATH --image-size 320 --output compared

Runs of one and three epochs determine how many epochs fit into `--seconds`. Each network trains in one
thread, on the same images at the same size, with at most one validation, and is scored by pycocotools on the
test split (or val). Ultralytics is installed into an environment in `--output` that reuses the packages of
this one; its command runs with its defaults (mosaic, 16 images per step). torchvision's networks train as in
its references: SGD and flips. `ratio` is our AP50 divided by the best peer's.
"""

import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import venv
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
import yaml
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from benchmarks.common import arguments, report, run
from trainer.base.errors import ConfigError, TrainingError
from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.evaluation.coco import evaluate
from trainer.evaluation.truth_and_predictions import Predictions

ROOT = Path(__file__).parents[1]
_PACKAGES = (
    "ultralytics==8.4.190", "ultralytics-thop==2.2.3", "opencv-python-headless==5.0.0.93", "polars==2.1.0",
    "polars-runtime-32==2.1.0",
)  # fmt: skip
"""Packages that Ultralytics needs in addition to the installed ones."""
_BATCH, _LR = 4, 0.02 / 4  # of torchvision's references, which use 0.02 for 16 images


def main() -> None:
    """Train all networks for the same CPU time and compare their AP50."""
    options = arguments(
        __doc__,
        source="sample",
        image_size=160,
        seconds=200.0,
        seed=0,
        ours="small",
        output="compared",
        peers="yolo11n,ssdlite320_mobilenet_v3_large,fasterrcnn_mobilenet_v3_large_320_fpn",
    )
    folder = Path(options.output).absolute()
    if folder.exists():
        raise ConfigError(f"--output {folder} exists", fix="name another folder, or remove it")
    folder.mkdir(parents=True)
    config, data = DataConfig(processes=1), str(folder / "data")
    options.shards = shard(download(options.source, data, config), data, config).uri
    options.split = _write_images(options.shards, folder)
    rows = {"ours": _train_and_score("ours", folder, options)}
    for name in options.peers.split(","):
        if name.startswith("yolo") and not (folder / "environment").exists():
            _install(folder / "environment")
        rows[name] = _train_and_score(name, folder, options)
        print(name, json.dumps(rows[name]), flush=True)
    figures = {
        f"{name}_{key}": row[key]
        for name, row in rows.items()
        for key in ("epochs", "cpu_seconds", "AP", "AP50")
    }
    ours = rows.pop("ours")["AP50"]
    figures["ratio"] = ours / max([1e-3, *(row["AP50"] for row in rows.values())])
    report("peers", figures["ratio"], figures, options, at_least={"ratio": 1.5})


def _train_and_score(name: str, folder: Path, options: Namespace) -> dict[str, Any]:
    """Train a network; return its epochs, CPU seconds and AP."""
    is_yolo = name.startswith("yolo")
    commands = _kubedet if name == "ours" else _yolo if is_yolo else _torchvision
    one, three = (_run(commands(name, epochs, folder, options)[0], folder) for epochs in (1, 3))
    epochs = max(1, round(options.seconds / max((three - one) / 2, 1e-3)))
    train, detect = commands(name, epochs, folder, options)
    seconds = _run(train, folder)
    _run(detect, folder)
    output = folder / f"{name}-{epochs}"
    if name == "ours":
        found, _ = Predictions.read(str(output / "evaluation" / "predictions.parquet"))
    else:
        rows = json.loads(next(output.rglob("predictions.json")).read_text())
        first = int(is_yolo)  # Ultralytics numbers classes from 1.
        found = Predictions.from_coco([{**row, "category_id": row["category_id"] - first} for row in rows])
    truth = ShardDataset(options.shards, options.split).annotations()
    metrics = evaluate(truth, found, engine="pycocotools").metrics
    return {"epochs": epochs, "cpu_seconds": seconds, "AP": metrics["coco/AP"], "AP50": metrics["coco/AP50"]}


def _run(command: Sequence[str], folder: Path) -> float:
    """Run a command and return its CPU seconds; its output goes to a log file."""
    changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "YOLO_CONFIG_DIR": str(folder)}
    changed |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log").open("ab") as log:
        ended = subprocess.run(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **changed}, check=False
        )
    if ended.returncode:
        problem = f"{' '.join(command[:3])} ended with {ended.returncode}"
        raise TrainingError(problem, fix=f"read {folder / 'log'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_images(shards: str, folder: Path) -> str:
    """Write the images as files, with labels in YOLO's format; return the split to score."""
    datasets = {name: ShardDataset(shards, name) for name in ShardDataset(shards, "train").index.splits}
    for name, dataset in datasets.items():
        images, labels = folder / "images" / name, folder / "labels" / name
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for jpeg, record in map(dataset.read, range(len(dataset))):
            (images / f"{record['image_id']}.jpg").write_bytes(jpeg)
            rows = [[item["category_id"], *item["bbox"]] for item in record["annotations"]]
            table = np.array(rows).reshape(-1, 5)
            table[:, 1:3] += table[:, 3:] / 2
            table[:, 1:] /= [record["width"], record["height"]] * 2
            np.savetxt(labels / f"{record['image_id']}.txt", table, "%g")
    classes = {item["id"]: item["name"] for item in dataset.annotations()["categories"]}
    data = {name: f"images/{name}" for name in datasets} | {"path": str(folder), "names": classes}
    (folder / "data.yaml").write_text(yaml.safe_dump(data))
    return "test" if "test" in datasets else "val"


def _install(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", *_PACKAGES], folder)


Commands = tuple[list[str], list[str]]  # commands that train, and that predict the scored split


def _kubedet(name: str, epochs: int, folder: Path, options: Namespace) -> Commands:
    output, (recipe, *overrides) = folder / f"{name}-{epochs}", options.ours.split()
    overrides += [f"loader.image_size={options.image_size}", "loader.workers=1", f"train.seed={options.seed}"]
    overrides += [f"train.epochs={epochs}", f"train.validate_every={epochs}"]
    words = [word for override in overrides for word in ("--set", override)]
    common = ["--recipe", recipe, *words, "--shards", options.shards]
    trainer = [sys.executable, "-m", "trainer"]
    train = [*trainer, "train", *common, "--output", str(output)]
    checkpoint = ["--checkpoint", str(output / "best.pt")]
    return train, [*trainer, "evaluate", *common, *checkpoint, "--output", str(output / "evaluation")]


def _yolo(name: str, epochs: int, folder: Path, options: Namespace) -> Commands:
    output, yolo = folder / f"{name}-{epochs}", folder / "environment" / "bin" / "yolo"
    common = [f"data={folder}/data.yaml", f"imgsz={options.image_size}", "device=cpu", "workers=0"]
    common += ["plots=false", f"project={output}"]
    train = [f"model={name}.yaml", f"epochs={epochs}", f"seed={options.seed}", "val=false", "name=train"]
    detect = [f"model={output}/train/weights/last.pt", f"split={options.split}", "save_json=true"]
    return [str(yolo), "train", *common, *train], [str(yolo), "val", *common, *detect, "name=detect"]


def _torchvision(name: str, epochs: int, folder: Path, options: Namespace) -> Commands:
    values = {"name": name, "epochs": epochs, "size": options.image_size, "seed": options.seed}
    values |= {"data": str(folder), "output": str(folder / f"{name}-{epochs}")}
    code = "import sys; from benchmarks import peers; peers.train_or_predict(sys.argv[1])"
    python = [sys.executable, "-c", code]
    detect = {**values, "epochs": 0, "split": options.split}
    return [*python, json.dumps({**values, "split": "train"})], [*python, json.dumps(detect)]


def train_or_predict(text: str) -> None:
    """Train a network of torchvision like its references, or (with 0 epochs) detect; `text` is JSON."""
    options = Namespace(**json.loads(text))
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    classes = len(yaml.safe_load(Path(options.data, "data.yaml").read_text())["names"])
    files = sorted(Path(options.data, "images", options.split).iterdir())
    build = getattr(torchvision.models.detection, options.name)
    model = build(weights=None, weights_backbone=None, num_classes=classes + 1)
    model.transform.min_size, model.transform.max_size = (options.size,), options.size
    if model.transform.fixed_size:
        model.transform.fixed_size = (options.size, options.size)
    output = Path(options.output)
    if not options.epochs:
        model.load_state_dict(torch.load(output / "model.pt", weights_only=True))
        (output / "predictions.json").write_text(json.dumps(_detect(model.eval(), files)))
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, weight_decay=1e-4)
    steps = len(files) // _BATCH
    for step in range(options.epochs * steps):
        if step % steps == 0:
            random.shuffle(files)
        done = step / (options.epochs * steps)
        rate = _LR * min(1, (step + 1) / min(1000, steps)) * 0.1 ** ((done >= 16 / 26) + (done >= 22 / 26))
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = step % steps * _BATCH
        losses = model(*zip(*map(_read_example, files[first : first + _BATCH]), strict=True))
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    output.mkdir(exist_ok=True)
    torch.save(model.state_dict(), output / "model.pt")


def _read_pixels(file: Path) -> Tensor:
    with Image.open(file) as image:
        return to_tensor(image.convert("RGB"))


def _read_example(file: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an image [3, H, W] with its targets, flipped at random."""
    pixels = _read_pixels(file)
    table = np.loadtxt(file.parents[2] / "labels" / file.parent.name / f"{file.stem}.txt", ndmin=2)
    labels, centers, sides = np.split(table.reshape(-1, 5), [1, 3], axis=1)
    if random.random() < 0.5:
        pixels, centers = pixels.flip(-1), [1, 0] - centers * [1, -1]
    corners = np.concatenate([centers - sides / 2, centers + sides / 2], axis=1)
    boxes = torch.from_numpy(corners).float() * torch.tensor([*pixels.shape[:0:-1]] * 2)
    return pixels, {"boxes": boxes, "labels": torch.from_numpy(labels[:, 0]).long() + 1}


@torch.inference_mode()
def _detect(model: torch.nn.Module, files: list[Path]) -> list[dict[str, Any]]:
    rows = []
    for file in files:
        found = model([_read_pixels(file)])[0]
        columns = (found[key].tolist() for key in ("boxes", "labels", "scores"))
        for (left, top, right, bottom), label, score in zip(*columns, strict=True):
            row = {"image_id": int(file.stem), "category_id": label - 1, "score": score}
            rows.append({**row, "bbox": [left, top, right - left, bottom - top]})
    return rows


if __name__ == "__main__":
    sys.exit(run(main))
