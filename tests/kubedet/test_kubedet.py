"""The Python interface: its examples, and the same results as the commands."""

import doctest
import importlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
from bundles import make_bundle
from PIL import Image

import kubedet
from kubedet import PipelineRun
from trainer.export import published_models

ROOT = Path(__file__).parents[2]
CLASSES = [{"id": 0, "name": "cat", "original_id": 17}, {"id": 1, "name": "dog", "original_id": 18}]
EXAMPLES = {
    test.name: test
    for module in ("kubedet", "kubedet.api", "kubedet.model", "kubedet.results")
    for test in doctest.DocTestFinder().find(importlib.import_module(module))
    if test.examples
}
TINY = {"train.epochs": 1, "loader.image_size": 96, "model.backbone_width": 8}
SLOW = dict.fromkeys(["kubedet.api.evaluate", "kubedet.api.compile"], pytest.mark.slow)
SLOW["kubedet.api.run"] = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the examples name."""
    monkeypatch.chdir(tmp_path)
    bundle = make_bundle(tmp_path / "runs/first/model", classes=CLASSES)
    published_models.publish(bundle, "data_root", "pets")
    Image.new("RGB", (192, 96), "white").save("photo.jpg")
    Image.new("RGB", (192, 96), "black").save("night.jpg")
    return tmp_path


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in EXAMPLES])
def test_examples(name, folder, request):
    if name == "kubedet.api.evaluate":
        (folder / "runs/first/train").mkdir()
        shutil.copy(request.getfixturevalue("trained"), "runs/first/train")
        shutil.copytree(request.getfixturevalue("shards"), "data_root/shards/0123abcd")
    printed, test = io.StringIO(), EXAMPLES[name]
    test.globs = {"kubedet": kubedet}
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.write)
    assert not printed.getvalue(), printed.getvalue()


@pytest.mark.parametrize(
    "model", ["runs/first/model", "pets", pytest.param("best.pt", marks=pytest.mark.slow)]
)
def test_predictions_are_those_of_the_command(model, folder, request):
    if model == "best.pt":
        shutil.copy(request.getfixturevalue("trained"), model)
    rng = np.random.default_rng(1)
    for number in range(10):  # More than a batch, of several sizes.
        pixels = rng.integers(0, 255, (60 + 9 * number, 90, 3), np.uint8)
        Image.fromarray(pixels).resize((200, 150 + number)).save(f"{number}.png")
    paths = sorted(folder.glob("*.png"))
    assert request.getfixturevalue("kubedet")("predict", model, *paths, "-o", "out", "--score", "0.1")[0] == 0
    loaded = kubedet.load(model)
    everything = loaded.predict(iter(paths), score=0.1)
    assert sum(map(len, everything)) >= 10
    for number, (path, many) in enumerate(zip(paths, everything, strict=True)):
        expected = json.loads((folder / "out" / f"{path.stem}.json").read_text())
        opened = Image.open(path)
        for image in (
            (str(path), io.BytesIO(path.read_bytes()), opened, np.asarray(opened)) if number < 2 else ()
        ):
            one = loaded.predict(image, score=0.1)
            assert np.array_equal(one.boxes, many.boxes) and one.class_names == many.class_names
            assert one.plot().size == many.size
        assert many.image_id == number and list(many.size) == [expected["width"], expected["height"]]
        assert many.class_names == [item["name"] for item in expected["detections"]]
        assert many.labels.tolist() == [item["label"] for item in expected["detections"]]
        boxes = np.array([item["box"] for item in expected["detections"]]).reshape(-1, 4)
        assert many.boxes == pytest.approx(boxes, abs=0.02) and many.boxes.dtype == np.float32
        assert many.scores == pytest.approx([item["score"] for item in expected["detections"]], abs=1e-5)
        many.plot().save(drawn := io.BytesIO(), "JPEG", quality=92)
        assert drawn.getvalue() == (folder / "out" / f"{path.stem}.jpg").read_bytes()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("none.jpg", "none.jpg cannot be read: No such file"),
        (["photo.jpg", "broken.jpg"], "broken.jpg: damaged or cut off"),
        (b"junk", "the image: not an image that can be read"),
        (io.StringIO("photo.jpg"), "StringIO object .* cannot be used"),
        (["photo.jpg", 7], r"images\[1\] cannot be used: it is int"),
        (np.zeros((3, 8, 8), np.float32), r"it is an array of float32 \[3, 8, 8\]"),
        (
            np.zeros((2, 8, 8, 1), np.uint8),
            r"images\[0\] cannot be used: it is an array of uint8 \[8, 8, 1\]",
        ),
    ],
)
def test_unusable_images_are_named(folder, images, message):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save("whole.jpg")
    Path("broken.jpg").write_bytes(Path("whole.jpg").read_bytes()[:1500])
    with pytest.raises(kubedet.KubedetError, match=message) as caught:
        kubedet.load("runs/first/model").predict(images)
    assert caught.value.fix
    with pytest.raises(kubedet.KubedetError, match="cannot be used: image file is truncated"):
        kubedet.load("pets").predict(Image.open("broken.jpg"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kubedet.load("runs/first"), "runs/first is not a bundle"),
        (lambda: kubedet.load("pets", tile=7), "the side of a tile must be at least 64 pixels"),
        (lambda: kubedet.load("pets", format="tflite"), "no format tflite"),
        (lambda: kubedet.load("pets").predict("photo.jpg", score=30), "from 0 to 1, not 30"),
        (lambda: kubedet.load("pets").predict("photo.jpg", score="0.3"), "from 0 to 1, not '0.3'"),
        (lambda: kubedet.load(None), "model: "),
        (lambda: kubedet.run(nproc="two"), "nproc: "),
        (lambda: kubedet.run(source="coco:/nowhere"), "/nowhere"),
        (lambda: kubedet.run(source="https://user:word@host/x.zip"), "name or password"),
        (lambda: kubedet.evaluate("runs/first/model", shards="nowhere"), "nowhere is not a folder of shards"),
        (lambda: kubedet.submit(PipelineRun(source="cards.zip", data_root="s3://b/r")), "pods cannot access"),
        (lambda: kubedet.submit(PipelineRun(data_root="s3://b/r", nodes="2")), "run.nodes: "),
        (lambda: kubedet.compile(output="photo.jpg/p.yaml"), "cannot write"),
    ],
)
def test_mistakes_are_errors_with_a_remedy(folder, call, message):
    with pytest.raises(kubedet.KubedetError, match=message) as caught:
        call()
    assert caught.value.fix or "\n" in caught.value.message


@pytest.mark.slow
def test_a_failed_step_is_an_error_also_in_a_thread(folder):
    with zipfile.ZipFile("cards.zip", "w") as archive:
        archive.writestr("data.yaml", "names: [ace]\ntrain: images\n")
    with ThreadPoolExecutor(1) as thread, pytest.raises(kubedet.KubedetError, match="download: ") as caught:
        thread.submit(kubedet.run, source="yolo:cards.zip").result()
    assert caught.value.fix


CLIENT = """
import time; start = time.process_time(); import kubedet, sys; print(time.process_time() - start)
print({"torch", "kfp", "numpy", "pyarrow", "matplotlib", "PIL"} & {*sys.modules})
sys.modules |= dict.fromkeys(["torch", "numpy", "pyarrow", "PIL"])  # As if they were not installed.
print(kubedet.submit(kubedet.PipelineRun(data_root="s3://bucket/root"), dry_run=True).parameters["data_root"])
try:
    kubedet.load("runs/first/model")
except kubedet.KubedetError as error:
    print(error.fix)
"""


def test_the_import_is_quick_and_a_client_needs_no_package_for_training():
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], capture_output=True, text=True, check=True, cwd=ROOT
    )
    seconds, loaded, root, fix = done.stdout.splitlines()
    assert float(seconds) < 0.3 and loaded == "set()"  # CPU seconds.
    assert root == "s3://bucket/root" and "[train]" in fix


@pytest.mark.slow
@pytest.mark.extra
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = (ROOT / "docs" / "quickstart.ipynb").read_text()
    assert "minutes=4" in text
    notebook = nbformat.reads(text.replace("minutes=4", f"nproc=1, overrides={TINY}"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("Train: done" in output.get("text", "") for output in outputs)
    assert any("image/png" in data for data in shown)
    assert not [output for output in outputs if output["output_type"] == "error"]
