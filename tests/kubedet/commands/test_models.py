"""`kubedet predict`, `kubedet model` and `kubedet serve`, as a person uses them."""

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bundles import make_bundle
from PIL import Image

from trainer.config.schema import DataConfig
from trainer.data.download import download
from trainer.export import published_models


@pytest.fixture
def kubedet(kubedet, tmp_path, monkeypatch):
    """Runs a command line in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return kubedet


@pytest.fixture
def published(tmp_path):
    for version, hour in (("v1", 8), ("v2", 9)):
        bundle = make_bundle(
            tmp_path / "runs" / version, version=version, created=f"2026-11-21T0{hour}:00:00+00:00"
        )
        published_models.publish(bundle, str(tmp_path / "data_root"), "pets")


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (192, 96), "white").save(tmp_path / "images" / "a.jpg")
    Image.new("RGB", (96, 192), "black").save(tmp_path / "images" / "b.png")
    return tmp_path / "images"


def test_predict_draws_and_writes_json(kubedet, published, images, tmp_path):
    code, out, err = kubedet("predict", "pets", "images", "-o", "out", "--score", "0.5")
    assert (code, err) == (0, "")
    assert "pets v2, onnx in onnxruntime" in out and "images/a.jpg: 1 dog <b>" in out
    assert "images/b.png: nothing found" in out
    assert sorted(os.listdir("out"))[1:] == ["a.jpg", "a.json", "b.jpg", "b.json", "detections.json"]
    result = json.loads((tmp_path / "out" / "a.json").read_text())
    assert result["image"] == "images/a.jpg" and result["detections"][0]["box"] == [24, 12, 96, 60]
    whole = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert whole["model"] == "pets v2" and len(whole["images"]) == 2
    with Image.open("out/a.jpg") as drawn:
        assert drawn.size == (192, 96) and drawn.convert("L").getextrema()[0] < 200


def test_predict_writes_annotations_for_other_tools(kubedet, published, images, tmp_path):
    nested = images / "night" / "a b.jpg"
    nested.parent.mkdir()
    Image.new("RGB", (192, 96), "white").save(nested)
    given = ("predict", "pets", "images", str(nested), "-o", "out", "--score", "0.5", "--annotations")
    assert kubedet(*given, "coco")[0] == 0
    coco = json.loads((tmp_path / "out" / "coco.json").read_text())
    assert [image["file_name"] for image in coco["images"]] == ["a.jpg", "b.png", "night/a b.jpg"]
    first, second = coco["annotations"]
    names = {category["id"]: category["name"] for category in coco["categories"]}
    assert names[first["category_id"]] == "dog <b>" and (first["image_id"], second["image_id"]) == (1, 3)
    assert first["bbox"] == [24, 12, 72, 48] and first["area"] == 72 * 48 and first["score"] > 0.5
    assert kubedet(*given, "label-studio")[0] == 0
    tasks = json.loads((tmp_path / "out" / "label-studio.json").read_text())
    assert [task["data"]["image"] for task in tasks][2] == "/data/local-files/?d=night/a%20b.jpg"
    (prediction,) = tasks[0]["predictions"]
    (box,) = prediction["result"]
    assert prediction["model_version"] == "pets v2" and box["value"]["rectanglelabels"] == ["dog <b>"]
    assert [box["value"][key] for key in ("x", "y", "width", "height")] == [12.5, 12.5, 37.5, 50]
    view = ElementTree.parse(tmp_path / "out" / "label-studio.xml").getroot()
    (labels,) = view.iter("RectangleLabels")
    assert (labels.get("name"), labels.get("toName")) == (box["from_name"], box["to_name"])
    assert "dog <b>" in [label.get("value") for label in labels]


def test_corrected_annotations_are_a_source(kubedet, published, images, tmp_path):
    """The file of COCO is read with the images, as it is."""
    assert (
        kubedet("predict", "pets", "images", "-o", "out", "--score", "0.5", "--annotations", "coco")[0] == 0
    )
    corrected = tmp_path / "corrected"
    (corrected / "train").mkdir(parents=True)
    (corrected / "annotations").mkdir()
    for image in images.iterdir():
        image.rename(corrected / "train" / image.name)
    Path("out/coco.json").rename(corrected / "annotations" / "instances_train.json")
    manifest = download(
        f"coco:{corrected}", str(tmp_path / "root"), DataConfig(val_fraction=0.0, processes=1)
    )
    assert manifest.splits["train"].images == 2


def test_predict_replaces_only_what_it_wrote(kubedet, published, images):
    """Neither the user's images, nor other files with the names of results, nor results that are inputs."""
    (images / "b.json").write_text("mine")
    assert kubedet("predict", "pets", "images/b.png", "-o", "out")[0] == 0
    before = {path: path.read_bytes() for path in [*images.iterdir(), Path("out/b.jpg")]}
    for read, folder in (("images", "images"), ("images/b.png", "images"), ("out/b.jpg", "out")):
        code, _, err = kubedet("predict", "pets", read, "-o", folder)
        assert code == 2 and f"{folder}/" in err
    assert {path: path.read_bytes() for path in before} == before
    assert kubedet("predict", "pets", "images", "-o", "out")[0] == 0


def test_predict_does_the_other_images(kubedet, published, images):
    (images / "c.jpg").write_text("junk")
    code, out, err = kubedet("predict", "pets", "images/a.jpg", "images/c.jpg", "none.jpg", "-o", "out")
    assert code == 2 and "images/a.jpg: 1 dog" in out
    assert (
        "2 of 3 images cannot be used" in err
        and "c.jpg: not an image that can be read" in err
        and "none.jpg" in err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing", "images"], "no current version of a model nothing"),
        (["pets@v9", "images"], "no version v9 of the model pets"),
        (["pets", "no/*.jpg"], "no file matches the pattern no/*.jpg"),
        (["pets", "empty"], "the folder empty contains no images"),
        (["pets", "images", "--score", "30"], "score: "),
        (["pets", "images", "--format", "tflite"], "no format tflite"),
    ],
)
def test_predict_refuses(kubedet, published, images, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    code, _, err = kubedet("predict", *words, "-o", "out")
    assert code in (1, 2) and message in err and "fix:" in err
    assert not (tmp_path / "out").exists()


def test_versions_are_listed_and_promoted(kubedet, published):
    code, out, _ = kubedet("model", "list")
    assert code == 0 and out.splitlines()[0] == "pets"
    assert [line[:4] for line in out.splitlines()[1:]] == ["  v1", "* v2"]
    assert kubedet("model", "promote", "pets", "v1")[1] == "current version of pets: v1\n"
    assert "* v1" in kubedet("model", "list")[1]
    assert kubedet("model", "promote", "pets", "v2")[1] == "current version of pets: v2\n"
    assert "# pets v2" in kubedet("model", "show", "pets")[1]
    assert "# pets v1" in kubedet("model", "show", "pets@v1")[1]
    assert (
        "no models are published under elsewhere" in kubedet("model", "list", "--data-root", "elsewhere")[1]
    )


def test_a_changed_byte_is_refused_by_every_command(kubedet, published, images, tmp_path):
    file = "model.onnx"
    path = tmp_path / "data_root/models/pets/v2" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    commands = [
        "model verify pets", "model promote pets v2", "serve pets --port 0",
        "predict pets images -o out",
    ]  # fmt: skip
    for words in map(str.split, commands):
        code, _, err = kubedet(*words)
        assert code == 2 and f"{file}: its bytes have changed" in err and "Traceback" not in err, words
    assert not (tmp_path / "out").exists()
