"""Predictions of a bundle, in pixels of the image; loading a model to score."""

import io
import json

import numpy as np
import pytest
import torch
from bundles import BOX, make_bundle
from PIL import Image

from trainer.base.errors import DataError, EvaluationError
from trainer.config.parsing import to_json
from trainer.config.types import NetworkInput
from trainer.data.decoding import read_sample
from trainer.data.images import normalize
from trainer.data.shard_index import ShardDataset
from trainer.evaluators import predictions
from trainer.export import bundle, formats, loading
from trainer.export.export import export
from trainer.export.predict import Detection, decode_image, draw, open_bundle, open_image, to_dict
from trainer.export.preprocess import preprocess
from trainer.launching.distributed import World

SIZE = 96


def test_boxes_come_back_in_pixels_of_the_image(bundle_uri):
    image = Image.new("RGB", (192, 48), "white")  # Twice as wide as the square: scale 1/2.
    model = open_bundle(bundle.load(bundle_uri))
    (detection,) = model(image)
    assert model(image, min_score=0.99) == []
    assert (detection.label, detection.name) == (1, "dog <b>")
    assert detection.score == pytest.approx(0.25 + 0.75 * 114 / 255)  # A quarter white, the rest padding.
    assert detection.box == (24.0, 12.0, 96.0, 48)  # 60 is beyond the image.
    assert json.loads(json.dumps(to_dict([detection], image)))["detections"][0]["box"] == [24, 12, 96, 48]


def test_a_large_image_is_detected_in_tiles(bundle_uri):
    image = Image.new("RGB", (170, 96), "white")
    model = open_bundle(bundle.load(bundle_uri), tile=96)
    assert [detection.box for detection in model(image)] == [(12, 6, 48, 30), (86, 6, 122, 30)]
    model = open_bundle(bundle.load(bundle_uri))
    assert len(model(image)) == 1


@pytest.mark.parametrize(("resize", "fill"), [("letterbox", 30), ("squash", 114)])
def test_the_way_of_resizing_follows_the_model(saved, shards, tiny, tmp_path, monkeypatch, resize, fill):
    """Checkpoint, bundle, evaluation and prediction invert the boxes of the training's square."""
    made = (tmp_path / "other", make_bundle(tmp_path / "other"))[0] / "model.onnx"
    monkeypatch.setattr(formats, "write_onnx", lambda graph, path: path.write_bytes(made.read_bytes()))
    config = to_json(tiny(loader__resize=resize, loader__fill=fill))
    source, target = saved(config=config), str(tmp_path / "model")
    export(source, shards, target, tiny(export__min_match=0.0, export__max_ap_change=1.0))
    square = NetworkInput(SIZE, resize, fill)
    described = bundle.load(target).metadata.input
    assert (described.resize, described.fill) == (resize, fill)
    rule = "whatever the aspect" if resize == "squash" else f"a square filled with {fill};"
    assert rule in described.preprocessing
    device, dataset = torch.device("cpu"), ShardDataset(shards, "val")
    model = loading.load_model(target, device)
    assert model.network_input == loading.load_model(source, device).network_input == square
    # The recipe of the evaluation fits images another way: that of the model counts.
    found = predictions.predict_rank_share(model, dataset, tiny(), World(0, 1, device))
    predictor = open_bundle(bundle.load(target))
    for index in range(len(dataset)):
        pixels, record = read_sample(dataset, index)
        width, height = record["width"], record["height"]
        drawn = (SIZE, SIZE)
        if resize == "letterbox":
            drawn = (round(width * SIZE / max(width, height)), round(height * SIZE / max(width, height)))
        factors = np.array([width, height] * 2) / (drawn * 2)
        expected = np.clip(np.array(BOX) * factors, 0, [width, height] * 2)
        (row,) = np.flatnonzero(found.image_ids == record["image_id"])
        assert [*found.boxes[row][:2], *(found.boxes[row][:2] + found.boxes[row][2:])] == pytest.approx(
            expected, abs=1e-6
        )
        (detection,) = predictor(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
        assert detection.box == pytest.approx(expected, abs=0.006)
        square_pixels, scales = preprocess(pixels.permute(1, 2, 0).numpy(), *square)
        assert scales == pytest.approx(1 / factors)
        assert detection.score == pytest.approx(square_pixels.float().mean().item() / 255, abs=1e-5)


@pytest.mark.parametrize("change", ["size", "classes"])
def test_a_graph_that_is_not_that_of_the_metadata_is_refused(tmp_path, change):
    make_bundle(tmp_path / "made")
    path = tmp_path / "made" / bundle.METADATA
    metadata = json.loads(path.read_text())
    if change == "size":
        metadata["input"]["input_size"] = 2 * SIZE
    else:
        metadata["classes"] = metadata["classes"][:1]
    path.write_text(json.dumps(metadata))
    bundle.write_checksums(tmp_path / "made")
    with pytest.raises(EvaluationError, match=bundle.METADATA):
        open_bundle(bundle.load(str(tmp_path / "made")))(Image.new("RGB", (192, 48), "white"))


def test_a_box_of_no_width_is_not_drawn():
    detections = [Detection(0, "cat", 0.9, (20.0, 30.0, 60.0, 70.0)), Detection(1, "x", 0.1, (5.0, 5, 5, 9))]
    image = Image.new("RGB", (100, 80))
    drawn = np.asarray(draw(image, detections))
    assert drawn[50, 20].any() and not drawn[:5].any() and not np.asarray(image).any()


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "a.jpg").write_text("junk")
    with pytest.raises(DataError, match=r"a\.jpg: not an image that can be read"):
        open_image(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"b\.jpg cannot be read: No such file"):
        open_image(tmp_path / "b.jpg")
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(whole, "JPEG")
    with pytest.raises(DataError, match="x: damaged or cut off"):
        decode_image(whole.getvalue()[:1500], "x")
    # Pillow would start another program for this format.
    with pytest.raises(DataError, match="not an image that can be read"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "it")


def _turned():
    image = Image.new("RGB", (40, 20), (200, 10, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # Turn by 90 degrees to see it upright.
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=95)
    buffer.seek(0)
    return buffer


def _written(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "RGBA", "LA", "1", "I;16"])
def test_images_are_decoded_as_for_training(kind, mode):
    """What a shard holds of the same file, as `normalize` writes it."""
    scene = Image.new("RGB", (32, 16), (204, 51, 0))
    scene.paste((0, 51, 204), (16, 0, 32, 16))
    image = Image.fromarray(np.array(scene.convert("L"), np.uint16) * 257) if mode == "I;16" else None
    image = image or scene.convert(mode)
    try:
        data = _written(image, kind)
    except (OSError, KeyError, ValueError):
        pytest.skip(f"{kind} has no {mode}")
    stored = Image.open(io.BytesIO(normalize(data, 1000, 100).jpeg)).convert("RGB")
    seen = decode_image(data, "it")
    assert seen.mode == "RGB" and np.abs(np.asarray(seen, int) - np.asarray(stored, int)).mean() < 6
    square, _ = preprocess(Image.open(io.BytesIO(data)), 32)
    assert np.abs(square[:, :16].permute(1, 2, 0).numpy().astype(int) - np.asarray(seen)).mean() < 6


def test_preprocessing_turns_by_exif_and_keeps_the_scale():
    square, scale = preprocess(Image.open(_turned()), SIZE)
    assert scale == pytest.approx(SIZE / 40)
    assert square[0, SIZE - 2, 20] > 150 and square[1, 20, SIZE - 2] == 114
    again, _ = preprocess(np.full((20, 40, 3), 7, np.uint8), SIZE)
    assert again.shape == (3, SIZE, SIZE) and again[0, 0, 0] == 7
