"""COCO JSON: layouts, images, boxes, and each kind of mistake named."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as runs
from source_rows import rows_of

from trainer.base.errors import DataError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.download import plan
from trainer.data.raw_manifest import SplitCounts
from trainer.data.sources import coco
from trainer.data.sources.coco import CocoSource, parse_box
from trainer.data.sources.source import UNKNOWN, BoxOptions, parse_split


def listing(path: Path):
    return CocoSource(str(path)).listing()


@pytest.fixture
def edited(make_coco, edit_json):
    """Make a set of images of train, whose annotations are changed."""

    def make(change, names=("a.jpg",)):
        root = make_coco(train=names)
        edit_json(root / "annotations" / "instances_train.json", change)
        return root

    return make


def boxes_of(rows) -> list[list[dict]]:
    """The boxes of each image."""
    return [row["boxes"] for row in rows_of(rows)]


def corners(box: dict) -> tuple[float, ...]:
    """x, y, width and height."""
    return tuple(box[side] for side in "xywh")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("instances_train2017.json", "train"), ("train.json", "train"), ("valid", "val"),
        ("instances_val.json", "val"), ("validation.json", "val"), ("image_info_test-dev2017.json", "test"),
        ("latest.json", None), ("interval.json", None), ("Train", "train"),
    ],
)  # fmt: skip
def test_names_of_splits(name, split):
    assert parse_split(name) == split


def test_a_folder_as_published(make_coco):
    listed = listing(make_coco(train2017=["000001.jpg", "000002.jpg"], val2017=["000003.jpg"]))
    assert {split: len(rows_of(rows)) for split, rows in listed.splits.items()} == {"train": 2, "val": 1}
    assert [tuple(category)[:2] for category in listed.categories] == [("cat", 3), ("dog", 17)]
    row = rows_of(listed.splits["train"])[0]
    assert (row["width"], row["height"], row["original_id"]) == (40, 30, "100")
    boxes = boxes_of(listed.splits["train"])[0]
    assert [(box["category"], corners(box), box["area"]) for box in boxes] == [
        (0, (1, 2, 10, 8), 80),
        (1, (2, 2, 10, 8), 80),
    ]


@pytest.mark.parametrize("place", ["images/train", "images", "JPEGImages", "train2017", ".", "annotations"])
def test_usual_places_of_images(make_coco, place):
    root = make_coco(train=["a.jpg", "b.jpg"])
    (root / "train").rename(root / "moved")
    shutil.copytree(root / "moved", root / place, dirs_exist_ok=True)
    shutil.rmtree(root / "moved")
    rows = rows_of(listing(root).splits["train"])
    assert [row["fault_reason"] for row in rows] == ["", ""] and all(row["version"] for row in rows)


def test_a_roboflow_export(make_coco):
    root = make_coco(train=["a.jpg"], valid=["b.jpg"])
    for split in ("train", "valid"):
        (root / "annotations" / f"instances_{split}.json").rename(root / split / "_annotations.coco.json")
    (root / "annotations").rmdir()
    listed = sources.parse(str(root)).listing()
    assert {split: rows_of(rows)[0]["file_name"] for split, rows in listed.splits.items()} == {
        "train": "a.jpg",
        "val": "b.jpg",
    }


def test_one_json_is_train_whatever_its_name(make_coco):
    root = make_coco(val2017=["a.jpg"])
    listed = sources.parse(str(root / "annotations" / "instances_val2017.json")).listing()
    assert list(listed.splits) == ["train"] and rows_of(listed.splits["train"])[0]["fault_reason"] == ""
    assert list(listing(root).splits) == ["train"]


def test_subfolders_backslashes_cases_and_accents(edited):
    names = ["city/a.jpg", "B.JPG", "e\u0301.jpg", "c.jpg", "c.JPG", "C.jpg"]  # The exact name comes first.

    def change(form):
        written = ["city\\a.jpg", "b.jpg", "\u00e9.jpg", *names[3:]]
        for image, name in zip(form["images"], written, strict=True):
            image["file_name"] = name

    root = edited(change, names)
    rows = rows_of(listing(root).splits["train"])
    assert [row["fault_reason"] for row in rows] == [""] * 6
    assert [Path(row["origin"]).relative_to(root / "train").as_posix() for row in rows] == names


@pytest.mark.parametrize("name", ["../a.jpg", "/etc/passwd", "x/../../a.jpg", "C:\\a.jpg", "..\\a.jpg", ".."])
def test_names_that_lead_out_of_the_folder_are_refused(edited, name):
    root = edited(lambda form: form["images"][0].update(file_name=name))
    with pytest.raises(DataError, match="leads outside the image folder"):
        listing(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"images": [', "is not JSON"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ("[" * 6000 + "]" * 6000, "is not JSON: it is nested too deeply"),
        ("[1, 2]", "no list .images."),
        ('{"images": [], "annotations": []}', "it has no list 'categories'"),
        ('{"images": [], "annotations": [], "categories": []}', "lists no images"),
        ('{"images": [3], "annotations": [], "categories": []}', "has an item that is not an object"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "lacks a file_name, or an id"),
        ('{"images": [{"id":1,"file_name":"a"}], "annotations": [], "categories": [{}]}', "integer id"),
    ],
)
def test_json_that_is_not_coco(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        sources.parse(str(tmp_path / "x.json")).listing()


def test_odd_annotations_do_not_stop_it(edited):
    def change(form):
        form["annotations"] += [
            {"image_id": 100, "category_id": 3, "bbox": [1, 2, float("nan"), 4]},
            {"image_id": 100, "category_id": 3, "bbox": "1 2 3 4"},
            {"image_id": 100, "category_id": 3},
            {"image_id": 100, "category_id": 99, "bbox": [1, 2, 3, 4]},
            {"image_id": 100, "category_id": [], "bbox": [1, 2, 3, 4], "area": "x"},
            {"image_id": 5, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": None, "category_id": 3, "bbox": [1, 2, 3, 4]},
            {"image_id": 100, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1},
        ]

    root = edited(change)
    listed = listing(root)
    boxes = boxes_of(listed.splits["train"])[0][2:]
    assert [corners(box) for box in boxes] == [(1, 2, 3, 4)] * 3
    assert [box["category"] for box in boxes] == [UNKNOWN, UNKNOWN, 0]
    assert [box["iscrowd"] for box in boxes] == [0, 0, 1]
    assert listed.problems.counts == {
        reasons.BOX_NOT_FINITE: 2,
        reasons.BOX_ABSENT: 1,
        reasons.BOX_UNKNOWN_IMAGE: 2,
    }


def test_an_image_listed_twice_is_one_with_all_boxes(edited):
    def change(form):
        form["images"].append({**form["images"][0], "id": 7})
        form["annotations"].append({"image_id": 7, "category_id": 3, "bbox": [5, 5, 5, 5]})

    root = edited(change)
    listed = listing(root)
    (boxes,) = boxes_of(listed.splits["train"])
    assert len(boxes) == 3
    assert listed.problems.counts == {reasons.IMAGE_LISTED_TWICE: 1}


def test_a_hidden_image_is_ignored_and_its_boxes_are_not(edited):
    listing = CocoSource(str(edited(lambda form: None, ("a.jpg", ".ipynb_checkpoints/a.jpg")))).listing()
    assert [row["file_name"] for row in rows_of(listing.splits["train"])] == ["a.jpg"]
    assert listing.problems.counts == {reasons.IMAGE_HIDDEN: 1, reasons.BOX_UNKNOWN_IMAGE: 2}


def test_two_images_with_one_id_are_both_faulty(edited):
    root = edited(lambda form: form["images"][1].update(id=100), ["a.jpg", "b.jpg", "c.jpg"])
    rows = rows_of(listing(root).splits["train"])
    assert {row["file_name"]: (row["fault_reason"], row["fault_detail"]) for row in rows} == {
        "a.jpg": (reasons.IMAGE_ID_TWICE, "id 100"),
        "b.jpg": (reasons.IMAGE_ID_TWICE, "id 100"),
        "c.jpg": ("", ""),
    }


def test_missing_images_are_faults_and_none_at_all_is_an_error(make_coco):
    root = make_coco(train=["a.jpg", "b.jpg"])
    (root / "train" / "b.jpg").unlink()
    faults = [row["fault_reason"] for row in rows_of(listing(root).splits["train"])]
    assert faults == ["", reasons.IMAGE_MISSING]
    shutil.rmtree(root / "train")
    with pytest.raises(DataError, match="were not found") as caught:
        listing(root)
    assert "a.jpg" in caught.value.message and "coco_url" in caught.value.fix


def test_categories_must_agree_between_splits(make_coco, edit_json):
    root = make_coco(train=["a.jpg"], val=["b.jpg"])
    path = root / "annotations" / "instances_val.json"
    edit_json(path, lambda form: form["categories"][0].update(name="cow"))
    with pytest.raises(DataError, match="category 3 'cow'"):
        listing(root)
    edit_json(path, lambda form: form["categories"].__setitem__(0, {"id": 50, "name": "cow"}))
    assert [category.name for category in listing(root).categories] == ["cat", "dog", "cow"]


def test_two_files_for_a_split_or_none_for_train(make_coco):
    root = make_coco(train=["a.jpg"], train2=["a.jpg"])
    with pytest.raises(DataError, match="are split 'train'"):
        listing(root)
    other = make_coco("other", val=["a.jpg"], test=["b.jpg"])
    with pytest.raises(DataError, match="no training split"):
        listing(other)


@pytest.mark.parametrize("image", [{"file_name": "\ud800.jpg"}, {"coco_url": "file:///etc/passwd"}])
def test_urls_that_cannot_be_fetched_are_not_followed(edited, image):
    root = edited(lambda form: form["images"].append({"id": 1, "file_name": "x.jpg"} | image))
    assert rows_of(listing(root).splits["train"])[1]["fault_reason"] == reasons.IMAGE_MISSING


def test_words_that_are_no_json_wherever_a_block_ends(make_coco, monkeypatch):
    root = make_coco(train=["a.jpg", "NaN, Infinity.jpg"])
    path = root / "annotations" / "instances_train.json"
    text = path.read_text().replace('"area": 80', '"area": NaN', 1).replace("[1, 2,", "[1,-Infinity,", 1)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (7, 100, 5000):
        monkeypatch.setattr(coco, "_BLOCK", size)
        listed = listing(root)
        rows = rows_of(listed.splits["train"])
        assert [row["file_name"] for row in rows] == ["a.jpg", "NaN, Infinity.jpg"]
        ((second,), (third, _)) = (row["boxes"] for row in rows)
        assert corners(second) == (2, 2, 10, 8) and third["area"] == 80
        assert listed.problems.counts == {reasons.BOX_NOT_FINITE: 1}


def test_ids_of_any_kind(edited):
    ids = [-1, -2, "7", 7, 2**63 - 1, 2**63, 2**64 - 3, 2**128 - 1]
    category = 2**70

    def change(form):
        form["categories"][0]["id"] = category
        for image, one in zip(form["images"], ids, strict=True):
            image |= {"id": one, "phash": 2**64 - 3, "gps": [1.5, -(2**63) - 1]}
        form["annotations"] = [
            {
                "id": 2**64 + place,
                "image_id": 7.0 if one == 7 else one,
                "category_id": category,
                "bbox": [place + 0.5, 0, 1, 1],
            }
            for place, one in [*enumerate(ids), *enumerate(ids, 10)]
        ]

    root = edited(change, [f"{number}.jpg" for number in range(8)])
    listed = listing(root)
    rows = rows_of(listed.splits["train"])
    assert [json.loads(row["original_id"]) for row in rows] == ids
    assert [[box["x"] for box in row["boxes"]] for row in rows] == [[n + 0.5, n + 10.5] for n in range(8)]
    assert [one.original_id for one in listed.categories] == [17, category] and not listed.problems.counts


def test_boxes_in_any_order_are_those_of_their_images(edited):
    def change(form):
        form["annotations"] = [dict(box) for box in 3 * form["annotations"]]
        random.Random(5).shuffle(form["annotations"])
        for place, box in enumerate(form["annotations"]):
            box["bbox"] = [place, 0, 1, 1]
        form["images"].append({**form["images"][4], "id": 7})
        form["annotations"].append({"image_id": 8, "category_id": 3, "bbox": [1, 2, 3, 4]})

    root = edited(change, [f"{number}.jpg" for number in range(23)])
    listed = listing(root)
    rows = rows_of(listed.splits["train"])
    assert [len(row["boxes"]) for row in rows] == [6] * 23
    assert all(row["boxes"] == sorted(row["boxes"], key=lambda box: box["x"]) for row in rows)
    assert rows_of(listed.splits["train"]) == rows  # What was wrong is counted once.
    assert listed.problems.counts == {
        reasons.IMAGE_LISTED_TWICE: 1,
        reasons.BOX_UNKNOWN_IMAGE: 1,
        reasons.ANNOTATION_ID_TWICE: 92,
    }


def test_a_full_disk_is_named(make_coco, monkeypatch):
    root = make_coco(train=[f"{number:0100}.jpg" for number in range(200)])
    monkeypatch.setattr(coco, "_TABLES", f"PRAGMA max_page_count = 10; {coco._TABLES}")
    with pytest.raises(StorageError, match="is full") as caught:
        listing(root)
    assert "TMPDIR" in caught.value.fix


DROP = object()
FROM_SEGMENTATION = BoxOptions("segmentation")


@pytest.mark.parametrize(
    ("bbox", "box"),
    [
        ([1, 2.5, 3, 4], (1, 2.5, 3, 4)),
        (None, reasons.BOX_ABSENT),
        ([], reasons.BOX_ABSENT),
        (["1", "2", "3", "4"], reasons.BOX_NOT_FINITE),
        ("1,5 2,5 3,5 4,5", reasons.BOX_NOT_FINITE),
        ([1, 2, 3, 4, 5], reasons.BOX_NOT_FINITE),
        ([1, None, 3, 4], reasons.BOX_NOT_FINITE),
        ([1, 2, 3, 1e300], reasons.BOX_NOT_FINITE),
        ([True, 2, 3, 4], reasons.BOX_NOT_FINITE),
        ({"x": 1}, reasons.BOX_NOT_FINITE),
        (7, reasons.BOX_NOT_FINITE),
    ],
)
def test_each_kind_of_bbox_is_told_apart(bbox, box):
    assert parse_box({"bbox": bbox}) == box


def test_the_box_of_polygons_is_their_extent():
    polygons = [[1.5, 2, 11, 2, 11, 22.25, 2, 22.25], [29, 1, 31, 1, 31, 5, 29, 5]]
    box = parse_box({"segmentation": polygons, "bbox": [0, 0, 1, 1]}, FROM_SEGMENTATION)
    assert box == (1.5, 1, 29.5, 21.25)
    drawn = runs.toBbox(runs.merge(runs.frPyObjects(polygons, 40, 50)))
    assert np.abs(drawn - box).max() <= 1  # Of the pixels that the library draws.


@pytest.mark.parametrize(
    "segmentation",
    [
        [[1, 2, 3]],
        [[1, 2]],
        [["1", "2", "3", "4"]],
        [[1, 2, 3, float("nan")]],
        "polygon",
        7,
    ],
)
def test_segmentations_that_are_no_polygons(segmentation):
    assert parse_box({"segmentation": segmentation}, FROM_SEGMENTATION) == reasons.SEGMENTATION_UNUSABLE


def test_without_a_segmentation_the_bbox_counts():
    assert parse_box({"segmentation": [], "bbox": [1, 2, 3, 4]}, FROM_SEGMENTATION) == (1, 2, 3, 4)
    mask = {"size": [2, 2], "counts": [4]}
    assert parse_box({"segmentation": mask, "bbox": [1, 2, 3, 4]}, FROM_SEGMENTATION) == (1, 2, 3, 4)
    assert parse_box({"segmentation": mask}, FROM_SEGMENTATION) == reasons.BOX_ABSENT
    assert parse_box({"segmentation": [[1, 2, 3, 4]]}) == reasons.BOX_ONLY_SEGMENTATION


@pytest.mark.parametrize(
    ("bbox", "named", "remedy"),
    [
        (DROP, reasons.BOX_ONLY_SEGMENTATION, "--set data.boxes_from=segmentation"),
        (["1", "2", "10", "8"], reasons.BOX_NOT_FINITE, "without quotation marks"),
    ],
)
def test_a_file_whose_boxes_cannot_be_used_is_named_before_images_are_fetched(
    edited, inspect, tmp_path, bbox, named, remedy
):
    def change(form):
        for annotation in form["annotations"]:
            annotation.pop("bbox")
            annotation.update({} if bbox is DROP else {"bbox": bbox})

    root = edited(change)
    code, out, err = inspect(f"coco:{root}")
    assert code == 2 and named in out and named in err and remedy in err
    assert f"{root}/annotations" in out and f"{root}/annotations" not in err  # Examples are printed once.
    assert "2 of 2 boxes are bad" in err
    with pytest.raises(DataError, match=named) as caught:
        plan(f"coco:{root}", str(tmp_path / "data"), DataConfig())
    assert remedy in caught.value.fix and not (tmp_path / "data" / "images").exists()


def test_boxes_from_segmentations_where_they_are_wanted(edited, inspect, tmp_path):
    def change(form):
        for annotation in form["annotations"]:
            del annotation["bbox"]
        form["annotations"][1]["segmentation"] = [[1, 5, 3, 5, 3, 15]]

    root = edited(change, ["a.jpg", "b.jpg"])
    code, out, _ = inspect(f"coco:{root}", "--set", "data.boxes_from=segmentation")
    assert code == 0 and "no problems" in out
    config = DataConfig(boxes_from="segmentation", val_fraction=0)
    planned = plan(f"coco:{root}", str(tmp_path / "data"), config)
    assert planned.splits == {"train": SplitCounts(2, 4)}
    first, _ = boxes_of(CocoSource(str(root), FROM_SEGMENTATION).listing().splits["train"])
    assert list(map(corners, first)) == [(1, 2, 4, 4), (1, 5, 2, 10)]
    with pytest.raises(DataError, match="only applies to COCO"):
        plan("sample", str(tmp_path / "data"), config)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("images", 1.5, "an id that is an integer or a string"),
        ("categories", 3.5, r'category {"id": .* lacks an integer id'),
        ("categories", "3", r'category {"id": .* lacks an integer id'),
    ],
)
def test_ids_that_are_no_integers_are_named(edited, part, value, message):
    with pytest.raises(DataError, match=message):
        listing(edited(lambda form: form[part][0].update(id=value)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(make_coco, encoding):
    root = make_coco(train=["a.jpg"])
    path = root / "annotations" / "instances_train.json"
    path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(DataError, match="JSON must be UTF-8"):
        listing(root)


def test_absolute_file_names_that_exist_are_taken(make_coco, edit_json, tmp_path, bucket, make_jpeg):
    root = make_coco(train=["a.jpg"])
    outside = tmp_path / "photos" / "b.jpg"
    outside.parent.mkdir()
    outside.write_bytes(make_jpeg(seed=5))
    secret = tmp_path / "photos" / "key"
    secret.write_text("x")
    path = root / "annotations" / "instances_train.json"

    def add(name):
        def change(form):
            form["images"] = [form["images"][0], {"id": 7, "file_name": str(name), "width": 40, "height": 30}]

        edit_json(path, change)

    add(outside)
    source = CocoSource(str(root))
    rows = rows_of(source.listing().splits["train"])
    assert [row["file_name"] for row in rows] == ["a.jpg", str(outside).lstrip("/")]
    assert rows[1]["version"] and source.read(rows[1]["origin"]) == make_jpeg(seed=5)
    add("../../photos/b.jpg")  # From the folder of the JSON.
    assert rows_of(source.listing().splits["train"])[1]["origin"] == str(outside)
    for name in (secret, tmp_path / "photos" / "gone.jpg"):  # No image, and not there.
        add(name)
        with pytest.raises(DataError, match=r"file_name .* and is not an image on this machine"):
            source.listing()
    # A file on a server does not reach into this machine.
    add(outside)
    (bucket / "x.json").write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="leads outside the image folder"):
        CocoSource("s3://bucket/x.json").listing()


def test_file_names_that_are_uris_are_fetched(edited):
    root = edited(lambda form: form["images"][0].update(file_name="s3://bucket/my/a.jpg"))
    assert rows_of(listing(root).splits["train"])[0]["origin"] == "s3://bucket/my/a.jpg"
