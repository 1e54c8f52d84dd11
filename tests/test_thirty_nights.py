"""Thirty nights of a recurring run, in a minute: when it trains, which version it leaves, and what is kept.

Each night calls what the steps of the pipeline call, on a source that grows, shrinks, breaks and drifts, and
frees what nothing needs. Only the launcher's part is this process's own: it trains where a process would be
started. The clock is the number of the night, in the names of the runs and the times of the files.
"""

import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, ImageDraw

from components import in_use, preparation, publishing, records, scoring, training
from components.launchers.backend import JobStatus, Phase, PodStatus
from components.starting_weights import CHAMPION
from operations import forgetting, lineage, retention
from trainer import __main__ as trainer
from trainer.base.errors import KubedetError
from trainer.export import published_models

CLASSES = ["disc", "block"]
SETTINGS = {
    "loader.image_size": 96, "model.backbone_width": 8, "model.fpn_channels": 16,
    "model.head_depth": 1, "model.anchor_sizes": [8.0, 16.0, 24.0, 32.0, 48.0], "train.epochs": 2,
    "train.validate_every": 1, "train.batch_size": 4, "train.compile": "off", "data.processes": 1,
    "export.formats": ["onnx"], "export.check_images": 2,
}  # fmt: skip
RULES = "drift/classes <= 0.3"
"""The only question of the gate: how good so small a detector is, says nothing."""

DRIFTING = 40
"""Images of one class that come in one night, and go again."""

PUBLISHED = [1, 7, 14, 25]
"""Nights after which there is a new champion."""

DAY = 24 * 3600.0


class Source:
    """A folder in COCO's form, as a team's labelling tool exports it every evening."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.images = folder, {"train": {}, "val": {}}
        for split, count in (("train", 12), ("val", 4)):
            for number in range(count):
                self.add(split, f"{split}-{number}.png", number % 2)
        self.export()

    def add(self, split, name, category):
        """Draw an image with one object of a class."""
        draw = random.Random(name)
        left, top, side = draw.randrange(4, 24), draw.randrange(4, 24), draw.randrange(16, 32)
        self.images[split][name] = (category, [left, top, side, side])
        picture = Image.new("RGB", (64, 64), (draw.randrange(90), draw.randrange(90), draw.randrange(90)))
        shape = (left, top, left + side, top + side)
        pen = ImageDraw.Draw(picture)
        (pen.rectangle if category else pen.ellipse)(shape, fill=(220, 200 * category, 40))
        path = self.folder / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)

    def remove(self, name):
        """Take an image away."""
        del self.images["train"][name]
        (self.folder / "train" / name).unlink()

    def export(self):
        """Write the annotations anew."""
        (self.folder / "annotations").mkdir(exist_ok=True)
        for split, images in self.images.items():
            content = {
                "images": [], "annotations": [],
                "categories": [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)],
            }  # fmt: skip
            for one, (name, (category, box)) in enumerate(sorted(images.items()), 1):
                content["images"].append({"id": one, "file_name": name, "width": 64, "height": 64})
                placed = {"image_id": one, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
                content["annotations"].append({"id": one, "category_id": category + 1, **placed})
            (self.folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


class Nights:
    """The recurring run."""

    def __init__(self, source: Source, root: Path) -> None:
        self.source, self.root = source, root
        self.now = self._begin = time.time() - 40 * DAY
        self.sizes: dict[int, int] = {}
        """Bytes of the data root after each night."""

    def run(self, night: int) -> tuple[str, str]:
        """List the source, and where the run pays train, evaluate and publish; return the end, and why."""
        self.now = self._begin + night * DAY
        try:
            return self._steps(f"night-{night:02}")
        except KubedetError as error:
            return "failed", error.message
        finally:
            self._date_files(night)

    def _date_files(self, night: int) -> None:
        """Let what was written in this night be of this night."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        for path in files:
            if path.stat().st_mtime > self._begin + 35 * DAY:
                os.utime(path, (self.now, self.now))
        self.sizes[night] = sum(path.stat().st_size for path in files)

    def _steps(self, name: str) -> tuple[str, str]:
        scratch, root = self.source.folder.parent, str(self.root)
        _, (shards, _) = preparation.prepare(
            f"coco:{self.source.folder}", "debug", SETTINGS, root, "", str(scratch / "page"), trains=True,
            min_new_images=2, prune=1,
        )  # fmt: skip
        if shards["kind"] == "nothing new":
            return "nothing new", shards["since"]
        asked = {"launcher": "local", "nodes": 1, "nproc": 1, "run_id": name}
        trained, _ = training.train(
            shards, f"{root}/runs/{name}", root, "debug", SETTINGS, asked, {}, (None, None), RULES, CHAMPION
        )
        pages = [str(scratch / part) for part in ("report", "summary", "verdict")]
        verdict = scoring.score(trained, RULES, *pages)["verdict"]
        if verdict["verdict"] == "pass":
            publishing.export_and_publish(trained)
        return "published" if verdict["verdict"] == "pass" else "held back", verdict["reason"]

    @property
    def champion(self) -> str:
        """Return the current version."""
        current = published_models.current(str(self.root), "source")
        return current.version if current else ""


@pytest.fixture
def nights(tmp_path, monkeypatch):
    """The first night is yet to come."""

    def train_here(launcher, spec, look):
        assert launcher == "local"
        look(JobStatus("train", Phase.RUNNING, pods=(PodStatus("a", "Running", 0, image_id="t@sha256:1"),)))
        assert trainer.main(list(spec.command[spec.command.index("train") :])) == 0

    monkeypatch.setattr(training.launchers, "run", train_here)
    monkeypatch.delenv("KUBEDET_NOTIFY_URL", raising=False)
    nights = Nights(Source(tmp_path / "source"), tmp_path / "root")
    for module in (retention, in_use):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: nights.now))
    return nights


@pytest.mark.slow
@pytest.mark.extra
def test_thirty_nights(nights):
    source, champions, told = nights.source, {}, {}
    for night in range(1, 31):
        if night == 6:
            source.add("train", "late-1.png", 0)
        elif night == 7:  # Two are new since the first night: as many as a run asks for.
            source.add("train", "late-2.png", 1)
        elif night == 14:
            source.remove("train-3.png")
            source.remove("train-4.png")
        elif night == 20:  # A day on which only discs were labelled.
            for number in range(DRIFTING):
                source.add("train", f"drift-{number}.png", 0)
        elif night == 22:
            for number in range(DRIFTING):
                source.remove(f"drift-{number}.png")
        elif night == 25:
            root = str(nights.root)
            forgetting.forget(root, forgetting.plan(root, ["train-5.png"]))
        source.export()
        if night == 11:
            annotations = source.folder / "annotations" / "instances_train.json"
            annotations.write_text(annotations.read_text()[:200])
        told[night] = nights.run(night)
        champions[night] = nights.champion
    # One night in six trains; the gate refuses what is another set of images, and that is not tried again.
    ends = dict.fromkeys(range(1, 31), "nothing new") | dict.fromkeys(PUBLISHED, "published")
    assert {night: end for night, (end, _) in told.items()} == ends | {11: "failed", 20: "held back"}
    assert "is not JSON" in told[11][1] and told[21][1] == "night-20, whose model was held back"
    # Of the runs there are those of the champion and of the version that a rollback would go to.
    assert {run.name for run in nights.root.joinpath("runs").iterdir()} == {"night-14", "night-25"}
    assert published_models.version_names(str(nights.root), "source") == sorted(
        [champions[14], champions[25]]
    )
    versions = list(dict.fromkeys(champions.values()))
    assert [list(champions.values()).index(version) + 1 for version in versions] == PUBLISHED
    assert all(told[night][1] == f"source {champions[night]}" for night in (2, 6, 10, 13, 15, 22, 26, 30))
    # Each image's bytes are there once; raw data and shards of those alone that had no image to forget.
    kept = list(nights.root.joinpath("images").rglob("*.png"))
    assert len(kept) == 12 + 4 + 2 - 2 - 1
    # Two runs and two versions are there after each of these nights.
    assert nights.sizes[30] < 1.1 * nights.sizes[8]
    assert len(list(nights.root.joinpath("shards").glob("*/index.json"))) == 1
    # Who saw an image is known of all nights, also of those whose data are gone.
    assert seen_by("train-5.png", nights.root) == (
        ["night-01", "night-07", "night-14", "night-20"],
        versions[:3],
    )
    assert seen_by("train-3.png", nights.root) == (["night-01", "night-07"], versions[:2])
    assert seen_by("drift-7.png", nights.root) == (["night-20"], [])
    last = lineage.trace("source", str(nights.root))
    assert (last["run"], last["run_images"]) == ("night-25", {"training": ["t@sha256:1"]})


def seen_by(image, root):
    """Return the runs and the versions that saw an image, in order."""
    seen = lineage.trace(image, str(root))["seen"]
    models = {model.partition("@")[2] for each in seen for model in each["models"]}
    order = [record.run for record in lineage.runs(str(root))]
    made = {record.run: record.model_version for record in records.PublishedRecord.read_all(str(root))}
    return (
        sorted({run for each in seen for run in each["runs"]}, key=order.index),
        [made[run] for run in order if made.get(run) in models],
    )
