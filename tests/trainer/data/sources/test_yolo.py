"""YOLO data sets: what their labels say, and the way to shards."""

import shutil

import pytest
from PIL import Image
from source_rows import entries_of
from yolo_sets import ONE, entries, names

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download, plan
from trainer.data.images import SHARES_UPRIGHT
from trainer.data.raw_folder import SplitCounts
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.sources.yolo import YoloSource


def test_boxes_are_shares_of_the_image_as_it_is_displayed(make_yolo):
    (entry,) = entries(make_yolo(train={"a": "1 0.5 0.5 0.25 0.5\n\n0 0.25 0.25 0.5 0.5"}))
    assert (entry.width, entry.height) == SHARES_UPRIGHT
    assert [(box.category, box.bbox) for box in entry.boxes] == [
        (1, (0.375, 0.25, 0.25, 0.5)), (0, (0, 0, 0.5, 0.5)),
    ]  # fmt: skip


def test_outlines_and_corners_become_the_box_around_them(make_yolo):
    text = "0 0.1 0.2 0.4 0.3 0.2 0.6\n1 0.5 0.1 0.9 0.5 0.5 0.9 0.1 0.5\n"
    (entry,) = entries(make_yolo(train={"a": text}))
    assert [[round(value, 9) for value in box.bbox] for box in entry.boxes] == [
        [0.1, 0.2, 0.3, 0.4], [0.1, 0.1, 0.8, 0.8],
    ]  # fmt: skip


def test_what_rounding_leaves_outside_is_no_clipped_box(make_yolo):
    text = "0 0.333333 0.5 0.666667 1\n0 0.833334 0.5 0.333333 1.000002\n0 0.9 0.5 0.21 0.5\n"
    (entry,) = entries(make_yolo(train={"a": text}))
    sides = [(box.bbox[0], round(box.bbox[0] + box.bbox[2], 9)) for box in entry.boxes]
    assert sides == [
        (0, pytest.approx(0.6666665)),
        (pytest.approx(0.6666675), 1),
        (pytest.approx(0.795), 1.005),
    ]


def test_key_points_are_left_out_where_the_set_has_them(make_yolo):
    root = make_yolo("train: images/train\nnames: [cat]\nkpt_shape: [1, 3]\n",
                     train={"a": "0 0.5 0.5 0.25 0.5 0.4 0.4 2\n"})  # fmt: skip
    assert entries(root)[0].boxes[0].bbox == (0.375, 0.25, 0.25, 0.5)


def test_missing_and_empty_label_files_are_images_without_objects(make_yolo):
    root = make_yolo(train={"a": ONE, "b": "", "c": None, "d": "\n \n", "e": ONE + ONE})
    assert [len(entry.boxes) for entry in entries(root)] == [1, 0, 0, 0, 1]
    assert all(entry.fault is None for entry in entries(root))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("0 0.5 0.5 0.25", "3 numbers after the class, not four"),
        ("0 0.5 0.5 0.25 0.5 0.93", "is the last a confidence"),
        ("2 0.5 0.5 0.25 0.5", "is of class 2, which the description does not name"),
        ("0.5 0.5 0.5 0.25 0.5", "is of class 0.5"),
        ("0 0,5 0,5 0,25 0,5", "'0,5', which is no number"),
        ("0 nan 0.5 0.25 0.5", "'nan', which is no number"),
        ("0 320 240 64 48", "320, which is outside of 0 to 1: divide pixels"),
        ("0 1.5 0.5 0.25 0.5", "1.5, which is outside of 0 to 1"),
    ],
)
def test_wrong_lines_are_named_with_file_line_and_remedy(make_yolo, tmp_path, line, why):
    root = make_yolo(train={"a": f"{ONE}{line}\n", "b": ONE})
    place = f"{root}/labels/train/a.txt:2: {line!r}"
    with pytest.raises(DataError) as caught:
        plan(f"yolo:{root}", str(tmp_path / "data"), DataConfig())
    assert place in caught.value.message and why in caught.value.message
    assert "1 of 3 boxes" in caught.value.message and "class x y width height" in caught.value.fix
    assert not (tmp_path / "data" / "images").exists()  # No image was fetched.
    planned = plan(f"yolo:{root}", str(tmp_path / "data"), DataConfig(max_bad_fraction=0.5))
    assert planned.problems[reasons.LABEL_LINE].count == 1
    with pytest.raises(DataError):  # A plan that is there already is no way around it.
        plan(f"yolo:{root}", str(tmp_path / "data"), DataConfig())


def test_a_label_file_in_utf_16_is_named(make_yolo):
    root = make_yolo(train={"a": ONE, "b": ""})
    (root / "labels" / "train" / "b.txt").write_bytes(ONE.encode("utf-16"))
    listing = YoloSource(str(root)).listing()
    assert [len(entry.boxes) for entry in entries_of(listing.splits["train"])] == [1, 0]
    assert "b.txt:1: it is UTF-16" in listing.problems.examples[reasons.LABEL_LINE][0]


def test_what_leads_out_of_a_confined_folder_is_not_followed(make_yolo, tmp_path):
    outside = make_yolo(root="outside", train={"a": ONE})
    root = make_yolo(f"train: {outside}/images/train\nnames: [cat]\n", train={"b": ONE})
    assert names(root)["train"] == [f"{outside}/images/train/a.jpg".lstrip("/")]
    for path in (f"{outside}/images/train", "../outside/images/train"):
        (root / "data.yaml").write_text(f"train: {path}\nnames: [cat]\n")
        with pytest.raises(DataError, match="no images for train"):
            YoloSource(str(root), confined=str(root)).listing()
    (root / "data.yaml").write_text("train: train.txt\nnames: [cat]\n")
    (root / "train.txt").write_text(f"{outside}/images/train/a.jpg\nimages/train/b.jpg\n")
    listing = YoloSource(str(root), confined=str(root)).listing()
    assert [bool(entry.fault) for entry in entries_of(listing.splits["train"])] == [True, False]


def test_the_state_changes_with_description_images_and_labels(make_yolo, make_jpeg):
    root = make_yolo(train={"a": ONE, "b": ONE})
    states = [YoloSource(str(root)).listing().state, YoloSource(str(root)).listing().state]
    assert states[0] == states[1]
    (root / "labels" / "train" / "a.txt").write_text("1 0.5 0.5 0.1 0.125\n")
    states.append(YoloSource(str(root)).listing().state)
    (root / "images" / "train" / "a.jpg").write_bytes(make_jpeg(seed=9))
    states.append(YoloSource(str(root)).listing().state)
    with (root / "data.yaml").open("a") as file:
        file.write("# changed\n")
    states.append(YoloSource(str(root)).listing().state)
    assert len(set(states)) == 4


@pytest.mark.slow
def test_from_a_bucket_to_shards(make_yolo, bucket, tmp_path):
    """All the way: a turned photograph keeps its box where people see it."""
    root = make_yolo(train={"a": ONE, "b": ONE}, val={"c": "1 0.25 0.125 0.5 0.25\n"})
    turned = Image.new("RGB", (40, 30))
    exif = turned.getexif()
    exif[0x0112] = 6  # Displayed as 30 x 40.
    turned.save(root / "images" / "val" / "c.jpg", exif=exif)
    shutil.copytree(root, bucket / "my" / "set")
    raw = download("yolo:s3://bucket/my/set", str(tmp_path / "data"), DataConfig())
    assert raw.splits == {"train": SplitCounts(2, 2), "val": SplitCounts(1, 1)}
    index = shard(raw, str(tmp_path / "data"), DataConfig())
    _, record = ShardDataset(index.uri, "val").read(0)
    assert (record["width"], record["height"]) == (30, 40)
    assert record["annotations"][0]["bbox"] == [0, 0, 15, 10]
    assert index.problems == {reasons.CLASS_WITHOUT_BOXES: 1}
    with pytest.raises(DataError, match="on the web cannot be listed"):
        YoloSource("https://example.org/set").listing()
