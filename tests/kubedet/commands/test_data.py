"""`kubedet data`: what it prints, what it draws, and its exit codes."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from trainer.data.box_labels import COLORS
from trainer.data.download import download
from trainer.data.preview import TILE
from trainer.data.shards import shard
from trainer.model import recipes

SOURCE = "sample:images=12,seed=2,size=96"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("data"))
    config = recipes.load("debug", {"data.processes": 1}).data
    raw = download(SOURCE, root, config)
    return raw.uri, shard(raw, root, config).uri


@pytest.fixture
def broken(tmp_path):
    config = recipes.load("debug", {"data.processes": 1}).data
    return Path(shard(download(SOURCE, str(tmp_path), config), str(tmp_path), config).uri)


@pytest.fixture
def data(kubedet):
    return partial(kubedet, "data")


def flip_a_byte(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_a_source_and_its_shards_have_the_same_counts(data, prepared):
    reports = [json.loads(data("inspect", uri, "--json")[1]) for uri in (SOURCE, prepared[1])]
    assert [report["kind"] for report in reports] == ["source", "shards"]
    for report in reports:
        assert report["statistics"] == reports[0]["statistics"]
        assert {split: of["images"] for split, of in report["splits"].items()} == {
            "train": 12,
            "val": 2,
            "test": 2,
        }
    assert reports[1]["splits"]["train"]["shards"] == 1
    assert reports[1]["splits"]["train"]["bytes"] == (Path(prepared[1]) / "train-00000.tar").stat().st_size


def test_the_text_has_splits_classes_and_problems(data, prepared):
    code, out, _ = data("inspect", prepared[1])
    assert code == 0
    assert out.startswith(f"shards {prepared[1]} (fingerprint {Path(prepared[1]).name})\n")
    assert "circle" in out and out.endswith("no problems\n")


def test_what_is_wrong_with_a_source_is_counted_with_examples(data, tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg")
    boxes = [[0, 0, 10, 10], [5, 5, 0, 4], [90, 90, 5, 5], [30, 20, 20, 20]]
    form = {
        "images": [
            {"id": 1, "file_name": "a.jpg", "width": 40, "height": 30},
            {"id": 2, "file_name": "gone.jpg", "width": 40, "height": 30},
        ],
        "annotations": [
            {"id": number, "image_id": 1, "category_id": 1, "bbox": box, "area": 1, "iscrowd": 0}
            for number, box in enumerate(boxes)
        ],
        "categories": [{"id": 1, "name": "[a] class"}, {"id": 2, "name": "none"}],
    }
    (tmp_path / "x.json").write_text(json.dumps(form))
    code, out, err = data("inspect", f"coco:{tmp_path}/x.json")
    assert code == 2 and "1 of 2 images are bad" in err and "gone.jpg" not in err
    assert "  1 box without area\n      a.jpg [5.0, 5.0, 0.0, 4.0]\n" in out
    assert "  1 box outside the image\n" in out and "  1 box clipped to the image\n" in out
    assert "[a] class" in out and "classes without a box in train (1):\n  none" in out
    _, out, _ = data("preview", f"coco:{tmp_path}/x.json", "-o", tmp_path / "p.png")
    assert "gone.jpg: " in out


def test_everything_that_is_damaged_is_named_at_once(data, broken):
    flip_a_byte(broken / "train-00000.tar", 700)
    os.truncate(broken / "val-00000.tar", 3000)
    (broken / "test-00000.tar").unlink()
    code, out, err = data("verify", broken)
    assert code == 2 and not out and "train-00000.tar: its sha256 is" in err
    assert re.search(r"val-00000.tar: 3,000 bytes, not [\d,]+; 2 of its 2 images are not in it\n", err)
    assert err.count("val-00000.tar") == 1, "once, and not for each of its images"
    assert "test-00000.tar" in err and f"fix: run `kubedet data verify --repair {broken}`" in err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("index.json", "{", "is not JSON: "),
        ("plan.json", '{"kind": "plan"}', "raw images"),
        ("train-00000.tar", "", "complete"),
    ],
)
def test_a_folder_that_cannot_be_used_is_an_error(data, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    (tmp_path / "train-00000.json").write_text("{}")
    for verb in ("inspect", "verify", "preview"):
        code, out, err = data(verb, tmp_path)
        assert code == 2 and not out and message in err and "  fix: " in err


@pytest.mark.parametrize("which", ["source", "shards"])
def test_a_sheet_shows_images_with_boxes(data, prepared, tmp_path, which):
    uri = {"source": SOURCE, "shards": prepared[1]}[which]
    code, out, _ = data("preview", uri, "-n", 5, "-o", tmp_path / "sheet.png")
    assert code == 0 and out.startswith("5 images of train with ") and "cannot be read" not in out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 3 * TILE and 2 * TILE < sheet.height < 3 * TILE
        # The color of the boxes' frames and names is that of their class.
        colors = {color for _, color in sheet.convert("RGB").getcolors(10**7)}
    assert colors & {ImageColor.getrgb(color) for color in COLORS[:7]}


@pytest.mark.slow
def test_a_sheet_shows_what_a_training_sees(data, prepared, tmp_path):
    """In a mosaic four images share a square."""
    words = ["preview", prepared[1], "--recipe", "debug", "-n", 8, "-o", tmp_path / "sheet.png"]
    boxes = []
    for mosaic in (1, 0):
        code, out, _ = data(*words, "--set", f"loader.mosaic={mosaic}")
        assert code == 0 and out.startswith("8 images of train (augmented) with ")
        boxes.append(int(re.search(r"with (\d+) boxes", out)[1]))
    assert boxes[0] > 2 * boxes[1] > 0


def test_unreadable_images_are_listed(data, broken, tmp_path):
    assert data("preview", broken, "-o", tmp_path / "whole.png")[1].startswith("12 images of train with ")
    os.truncate(broken / "train-00000.tar", 3000)
    code, out, _ = data("preview", broken, "-o", tmp_path / "broken.png")
    assert code == 0 and out.startswith("0 images of train with 0 boxes in ")
    assert "\ncannot be read (12):\n" in out
    assert out.count("image id") == 10 and out.endswith("  and 2 more\n")


def test_mistakes_are_refused(data, prepared, tmp_path):
    assert "no split 'dev'" in data("preview", prepared[1], "--split", "dev")[2]
    assert "count: " in data("preview", prepared[1], "-n", 0)[2]
    code, _, err = data("preview", prepared[1], "--set", "loader.mosaic=1")
    assert code == 2 and "loader.mosaic" in err and "--recipe small" in err
    assert "must be a PNG file" in data("preview", prepared[1], "-o", "x.jpg")[2]
    assert "contains neither complete shards" in data("verify", tmp_path)[2]
    code, _, err = data("inspect", tmp_path / "nothing")
    assert code == 2 and "does not exist" in err
