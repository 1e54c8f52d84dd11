"""Predictions of a bundle, in pixels of the image."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from trainer.errors import DataError, ExportError, StorageError
from trainer.export import bundle
from trainer.export.predict import Found, as_json, draw, open_bundle, open_image
from trainer.export.preprocess import preprocess

SIZE = 96


def test_boxes_come_back_in_pixels_of_the_image(made):
    image = Image.new("RGB", (192, 48), "white")  # Twice as wide as the square: scale 1/2.
    with open_bundle(bundle.load(made)) as model:
        (found,) = model(image)
        assert model(image, least=0.99) == []
    assert (found.label, found.name) == (1, "dog <b>")
    assert found.score == pytest.approx(0.25 + 0.75 * 114 / 255)  # A quarter white, the rest padding.
    assert found.box == (24.0, 12.0, 96.0, 48)  # 60 is beyond the image.
    assert json.loads(json.dumps(as_json([found], image)))["detections"][0]["box"] == [24, 12, 96, 48]


def test_a_changed_model_is_not_run(made, tmp_path):
    data = bytearray((tmp_path / "made" / "model.onnx").read_bytes())
    data[-3] ^= 1
    (tmp_path / "made" / "model.onnx").write_bytes(data)
    with pytest.raises(StorageError, match=r"model\.onnx"), open_bundle(bundle.load(made)):
        pass


def test_a_format_that_is_not_in_the_bundle(made):
    with pytest.raises(ExportError, match="no format openvino"), open_bundle(bundle.load(made), "openvino"):
        pass


def test_drawing_changes_a_copy_alone():
    image = Image.new("RGB", (100, 80))
    drawn = draw(image, [Found(0, "cat", 0.9, (20.0, 30.0, 60.0, 70.0)), Found(1, "x", 0.1, (5.0, 5, 5, 9))])
    assert not np.asarray(image).any()
    assert drawn.getpixel((20, 50)) != (0, 0, 0) and drawn.getpixel((40, 50)) == (0, 0, 0)
    assert np.asarray(drawn)[:5].sum() == 0  # A box of no width is not drawn.


def test_what_is_no_image(tmp_path):
    (tmp_path / "a.jpg").write_text("junk")
    with pytest.raises(DataError, match=r"a\.jpg is not an image"):
        open_image(tmp_path / "a.jpg")
    with pytest.raises(DataError, match=r"b\.jpg cannot be read: No such file"):
        open_image(tmp_path / "b.jpg")
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(whole, "JPEG")
    with pytest.raises(DataError, match="what was sent cannot be read"):
        open_image(io.BytesIO(whole.getvalue()[:300]), "what was sent")


def _turned():
    image = Image.new("RGB", (40, 20), (200, 10, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # Turn by 90 degrees to see it upright.
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=95)
    buffer.seek(0)
    return buffer


def test_images_are_seen_upright():
    assert open_image(_turned(), "it").size == (20, 40)


def test_preprocessing_turns_by_exif_and_keeps_the_scale():
    square, scale = preprocess(Image.open(_turned()), SIZE)
    assert scale == pytest.approx(SIZE / 40)
    assert square[0, SIZE - 2, 20] > 150 and square[1, 20, SIZE - 2] == 114
    again, _ = preprocess(np.full((20, 40, 3), 7, np.uint8), SIZE)
    assert again.shape == (3, SIZE, SIZE) and again[0, 0, 0] == 7
