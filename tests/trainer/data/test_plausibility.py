"""Data of the right form that is wrong: what is refused, what is a warning, and what passes."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from source_rows import shards_of

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import plausibility
from trainer.data.download import download
from trainer.data.images import normalize
from trainer.data.raw_manifest import Category
from trainer.report.shards_page import render_shards_page

SIZE = 160, 120
Form = dict[str, Any]


@pytest.fixture(scope="module")
def scenes() -> list[tuple[Image.Image, list[list[float]]]]:
    """Pictures of random colors, each with three boxes."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(40):
        colors = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        picture = Image.fromarray(colors).resize(SIZE, Image.Resampling.BICUBIC)
        starts = random.integers(5, (90, 60), (3, 2))
        sides = random.integers(20, 60, (3, 2))
        made.append((picture, np.concatenate([starts, sides], axis=1).astype(float).tolist()))
    return made


@pytest.fixture
def make(tmp_path, scenes) -> Callable[..., Path]:
    """Write a COCO set of 20 training images, 5 for validation and 5 for the test; return its folder."""

    def write(change: Callable[[str, Form], None] = lambda split, form: None) -> Path:
        root, number = tmp_path / "set", 0
        (root / "annotations").mkdir(parents=True)
        (root / "images").mkdir()
        for split, count in (("train", 20), ("val", 5), ("test", 5)):
            form: Form = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "Cat"}]}
            for _ in range(count):
                picture, boxes = scenes[number]
                name = f"{number}.jpg"
                picture.save(root / "images" / name)
                form["images"].append({"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1]})
                form["annotations"] += [
                    {"id": 100 * number + at, "image_id": number, "category_id": 1, "bbox": box, "iscrowd": 0}
                    for at, box in enumerate(boxes)
                ]
                number += 1
            change(split, form)
            (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(form))
        return root

    return write


def each(convert: Callable[[str, Form], Form]) -> Callable[[str, Form], None]:
    """Change all annotations, by their split."""

    def change(split: str, form: Form) -> None:
        for annotation in form["annotations"]:
            annotation |= convert(split, annotation)

    return change


def written(convert: Callable[[list[float]], list[float]]) -> Callable[[str, Form], None]:
    return each(lambda _, annotation: {"bbox": convert(annotation["bbox"])})


def corners(box: list[float]) -> list[float]:
    return [box[0], box[1], box[0] + box[2], box[1] + box[3]]


def fractions(box: list[float]) -> list[float]:
    return [value / side for value, side in zip(box, 2 * SIZE, strict=True)]


def three_names(split: str, form: Form) -> None:
    form["categories"] += [{"id": 2, "name": "cat "}, {"id": 3, "name": "\uff23A\u200bT"}]
    for number, annotation in enumerate(form["annotations"]):
        annotation["category_id"] = 1 + number % 3


def crowds_of(which: str) -> Callable[[str, Form], None]:
    return each(lambda split, _: {"iscrowd": int(split == which)})


def without_boxes(which: str) -> Callable[[str, Form], None]:
    return lambda split, form: form["annotations"].clear() if split == which else None


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (written(corners), "[x1, y1, x2, y2]", ["--set", "data.box_format=xyxy"]),
        (written(fractions), "normalised", ["--set", "data.box_format=normalised"]),
        (three_names, "'cat '", []),
        (crowds_of("train"), "train are crowd regions", []),
        (crowds_of("val"), "val are crowd regions", []),
        (without_boxes("val"), "val has no boxes", []),
        (without_boxes("test"), "test has no boxes", []),
    ],
)
def test_wrong_annotations_end_inspect_and_the_first_step_of_a_run(
    make, inspect, tmp_path, change, message, remedy
):
    root = make(change)
    code, _, err = inspect(root)
    assert code == 2 and message in err and " ".join(remedy) in err
    with pytest.raises(DataError) as error:  # What `prepare` and `plan` call, before images are fetched.
        download(f"coco:{root}", str(tmp_path / "data"), DataConfig())
    assert message in error.value.message and not (tmp_path / "data" / "images").exists()
    if remedy:
        code, out, _ = inspect(root, *remedy)
        assert code == 0 and "no problems" in out
        assert "--set data." in out.splitlines()[-1], "the suggested command repeats the options"


@pytest.mark.slow
def test_the_remedies_give_the_boxes_and_classes_of_the_sound_set(make, tmp_path):
    read = []
    for change, options in (
        (lambda split, form: None, {}),
        (written(corners), {"box_format": "xyxy"}),
        (written(fractions), {"box_format": "normalised"}),
    ):
        root = make(change).rename(tmp_path / f"set{len(read)}")
        index = shards_of(f"coco:{root}", tmp_path / "data", DataConfig(processes=1, **options))
        assert index.categories == [Category(0, "Cat", 1)]
        sidecar = json.loads(Path(index.uri, "val-00000.json").read_text())
        boxes = {row["file_name"]: [box["bbox"] for box in row["annotations"]] for row in sidecar["rows"]}
        read.append({name: np.round(boxes[name], 2).tolist() for name in boxes})
    assert len(read[0]) == 5 and all(one == read[0] for one in read)


def exchanged(split: str, form: Form) -> None:
    for image in form["images"]:
        image["width"], image["height"] = image["height"], image["width"]


def double_size(split: str, form: Form) -> None:
    for image in form["images"]:
        image |= {"width": 2 * SIZE[0], "height": 2 * SIZE[1]}


def one_pixel(split: str, form: Form) -> None:
    for image in form["images"]:
        image |= {"width": -1, "height": -1} if split == "val" else {"width": 1, "height": 1}


def double_size_and_boxes(split: str, form: Form) -> None:
    double_size(split, form)
    written(lambda box: [2 * side for side in box])(split, form)


def only_in_val(split: str, form: Form) -> None:
    form["categories"].append({"id": 2, "name": "Dog"})
    if split == "val":
        form["annotations"][0]["category_id"] = 2


@pytest.mark.parametrize(
    ("change", "options", "shown"),
    [
        (double_size_and_boxes, [], "320x240 annotated, 160x120 stored: boxes are scaled by 0.5)\n"),
        (double_size, [], "scaled by 0.5); all boxes also fit without scaling"),
        (one_pixel, [], "image size differs from the annotated one: 30 (first: "),
        (only_in_val, [], "warning: 1 classes have boxes in val or test, and none in train: Dog"),
        (each(lambda split, _: {"id": 5}), [], "(first: id 5 in "),
        (written(corners), ["--set", "data.box_format=xywh"], "warning: suspicious boxes"),
        (three_names, ["--set", 'data.classes=["Cat", "cat ", "\uff23A\u200bT"]'], "no problems"),
        (exchanged, [], "annotated width and height exchanged: 30 (first: "),
        (written(lambda box: [*box[:2], 3, 3]), [], "100% of 90 boxes are smaller than 4 x 4 pixels"),
    ],
)
def test_what_may_be_meant_is_a_warning_or_passes(make, inspect, change, options, shown):
    code, out, _ = inspect(make(change), *options)
    assert code == 0 and shown in out


def test_twelve_bits_in_a_16_bit_file_are_scaled_by_their_range(scenes):
    picture = scenes[0][0].convert("L")
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(picture).astype(np.uint16) * 16).save(buffer, "PNG")
    image = normalize(buffer.getvalue(), 1600, 100)
    got = np.asarray(Image.open(io.BytesIO(image.jpeg)).convert("RGB")).astype(int)
    expected = np.asarray(picture.convert("RGB")).astype(int)
    assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.99 and got.max() > 250 and got.min() < 5


def test_warnings_reach_the_index_and_the_page(make, inspect, tmp_path):
    """A picture of train is in val under another name, smaller and compressed."""
    root = make(each(lambda split, _: {"id": 5}))
    Image.open(root / "images" / "3.jpg").resize((120, 90)).save(root / "images" / "20.jpg", quality=60)
    val = root / "annotations" / "instances_val.json"
    form = json.loads(val.read_text())
    form["images"][0] |= {"width": 120, "height": 90}
    form["annotations"] = [one for one in form["annotations"] if one["image_id"] != 20]
    val.write_text(json.dumps(form))
    code, out, _ = inspect(root)
    assert code == 0 and "1 of val in train (first: 20.jpg and 3.jpg)" in out
    index = shards_of(f"coco:{root}", tmp_path / "data", DataConfig(processes=1))
    html = render_shards_page(index)
    assert all(warning in html for warning in index.warnings)
    assert inspect(index.uri)[1].count("warning: ") == len(index.warnings) == 2


def test_copies_of_a_labeled_image_without_boxes_are_named(make, inspect, tmp_path):
    def copy(split: str, form: Form) -> None:
        if split == "train":
            form["images"].append({"id": 99, "file_name": "copy.jpg", "width": SIZE[0], "height": SIZE[1]})

    root = make(copy)
    (root / "images" / "copy.jpg").write_bytes((root / "images" / "3.jpg").read_bytes())
    index = shards_of(f"coco:{root}", tmp_path / "data", DataConfig(processes=1))
    for text in (inspect(root)[1], inspect(index.uri)[1]):
        assert "(first: train/copy.jpg is train/3.jpg)" in text


def test_images_that_were_rotated_after_the_annotation_end_the_data_steps(make, inspect, tmp_path):
    root = make()
    for path in (root / "images").iterdir():
        Image.open(path).transpose(Image.Transpose.ROTATE_90).save(path)
    code, _, err = inspect(root)
    assert code == 2 and "30 of 30 images are rotated" in err
    with pytest.raises(DataError, match="are rotated"):
        shards_of(f"coco:{root}", tmp_path, DataConfig(processes=1))


def test_near_duplicates_are_found_across_splits_only(scenes):
    def hash_of(picture: Image.Image, **options: Any) -> bytes:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", **options)
        return plausibility.picture_hash(buffer.getvalue())

    train = [hash_of(picture) for picture, _ in scenes[:20]]
    val = [hash_of(picture) for picture, _ in scenes[20:30]]
    val += [hash_of(scenes[4][0], quality=40), hash_of(scenes[5][0].resize((320, 240)))]
    arrays = {
        "train": plausibility.decode_hashes(b"".join(train + train)),
        "val": plausibility.decode_hashes(b"".join(val)),
    }
    (warning,) = plausibility.duplicate_warnings(arrays, lambda split, row: f"{split} {row % 20}")
    assert ": 2 of val in train (" in warning
    assert "val 10 and train 4" in warning and "val 11 and train 5" in warning
