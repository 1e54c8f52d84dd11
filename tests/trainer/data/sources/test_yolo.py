"""YOLO data sets: descriptions, layouts of other tools, labels, and the way to shards."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from pytest import approx
from source_rows import entries_of, shards_of

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.download import download, plan
from trainer.data.images import DISPLAYED_SHARES
from trainer.data.raw_manifest import SplitCounts
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.sources.yolo import YoloSource

ONE = "0 0.5 0.5 0.25 0.5\n"


def names(root: Path | str) -> dict[str, list[str]]:
    """File names of each split."""
    listing = sources.parse(f"yolo:{root}").listing()
    return {split: [entry.file_name for entry in entries_of(rows)] for split, rows in listing.splits.items()}


def entries(root: Path | str, split: str = "train") -> list:
    return entries_of(YoloSource(str(root)).listing().splits[split])


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_whose_folder_is_missing_is_an_error_that_names_the_folders_there(make_yolo, split):
    """Train's images were held out instead."""
    other = {"val": "validation", "test": "testing"}[split]
    root = make_yolo(
        f"train: images/train\n{split}: ../images/{split}\nnames: [cat]\n",
        train={"a": ONE},
        **{other: {"b": ONE}},
    )
    with pytest.raises(DataError) as caught:
        YoloSource(str(root)).listing()
    for part in (f"{split}: ../images/{split}", f"{root}/images", other):
        assert part in caught.value.message
    (root / "images" / split).mkdir()
    (root / "images" / split / "notes.md").write_text("x")
    if split == "val":
        with pytest.raises(DataError, match="no images in"):
            YoloSource(str(root)).listing()


@pytest.mark.parametrize("empty", [False, True])
def test_a_test_that_an_export_left_out_is_reported(make_yolo, tmp_path, empty):
    root = make_yolo("train: images/train\ntest: ../test/images\nnames: [cat]\n", train={"a": ONE, "b": ONE})
    if empty:
        (root / "test" / "images").mkdir(parents=True)
    listing = YoloSource(str(root)).listing()
    assert list(listing.splits) == ["train"]
    assert listing.problems.examples == {reasons.SPLIT_EMPTY: ["test: ../test/images"]}
    index = shards_of(f"yolo:{root}", tmp_path / "data", DataConfig(processes=1))
    assert any("../test/images" in warning for warning in index.warnings)  # The report repeats them.


def test_hidden_files_and_folders_are_ignored_and_counted(make_yolo, make_jpeg, tmp_path):
    root = make_yolo(train={"a": ONE})
    for name in (".ipynb_checkpoints/a.jpg", "._a.jpg", "__MACOSX/a.jpg"):
        path = root / "images" / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make_jpeg())
    (root / "._data.yaml").write_bytes((root / "data.yaml").read_bytes())
    (root / "all.txt").write_text("# all\nimages/train/a.jpg\n./images/train/._a.jpg\n")
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, root.name)
    for source, hidden in ((root, 3), (packed, 3)):
        listing = sources.parse(str(source)).listing()
        assert [entry.file_name for entry in entries_of(listing.splits["train"])] == ["images/train/a.jpg"]
        assert listing.problems.counts == {reasons.IMAGE_HIDDEN: hidden}
    (root / "data.yaml").write_text("train: all.txt\nnames: [cat, dog]\n")
    assert names(root)["train"] == ["images/train/a.jpg"]


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 0.6 0.6", "0 0.3 0.3 0.2 0.2 0 0 0.3 0.35"], 2),
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 1 0.6 0.6 1", "0 0.5 0.5 0.4 0.4 0.4 0.4 1 0.6 0.6 0"], 2),
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 0.6 0.6", "0 0.1 0.2 0.3 0.2 0.3 0.4 0.1 0.4"], 0),  # rotated boxes
        (["0 0.5 0.5 0.4 0.4 0.4 0.4", "0 0.5 0.5 0.4 0.4"], 0),
    ],
)
def test_rows_that_may_be_key_points_without_kpt_shape(make_yolo, lines, count):
    root = make_yolo(train={"a": lines[0], "b": lines[1]})
    listing = YoloSource(str(root)).listing()
    entries_of(listing.splits["train"])
    assert listing.problems.counts == ({reasons.MAY_BE_KEY_POINTS: count} if count else {})


def test_boxes_are_shares_of_the_image_as_it_is_displayed(make_yolo):
    (entry,) = entries(make_yolo(train={"a": "1 0.5 0.5 0.25 0.5\n\n0 0.25 0.25 0.5 0.5"}))
    assert (entry.width, entry.height) == DISPLAYED_SHARES
    assert [(box.category, box.bbox) for box in entry.boxes] == [
        (1, (0.375, 0.25, 0.25, 0.5)),
        (0, (0, 0, 0.5, 0.5)),
    ]


def test_outlines_and_corners_become_the_box_around_them(make_yolo):
    text = "0 0.1 0.2 0.4 0.3 0.2 0.6\n1 0.5 0.1 0.9 0.5 0.5 0.9 0.1 0.5\n"
    (entry,) = entries(make_yolo(train={"a": text}))
    assert [[round(value, 9) for value in box.bbox] for box in entry.boxes] == [
        [0.1, 0.2, 0.3, 0.4],
        [0.1, 0.1, 0.8, 0.8],
    ]


def test_what_rounding_leaves_outside_is_no_clipped_box(make_yolo):
    text = "0 0.333333 0.5 0.666667 1\n0 0.833334 0.5 0.333333 1.000002\n0 0.9 0.5 0.21 0.5\n"
    (entry,) = entries(make_yolo(train={"a": text}))
    sides = [(box.bbox[0], round(box.bbox[0] + box.bbox[2], 9)) for box in entry.boxes]
    assert sides == [(0, approx(0.6666665)), (approx(0.6666675), 1), (approx(0.795), 1.005)]


def test_key_points_are_left_out_where_the_set_has_them(make_yolo):
    root = make_yolo(
        "train: images/train\nnames: [cat]\nkpt_shape: [1, 3]\n",
        train={"a": "0 0.5 0.5 0.25 0.5 0.4 0.4 2\n"},
    )
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
        ("0 0.5 0.5 0.25 0.5" + 17 * " 0.5 0.5 2", "kpt_shape"),
        ("0 0.5 0.5 0.25 0.5" + 2 * " 0.5 0.5 2", "kpt_shape"),
        ("2 0.5 0.5 0.25 0.5", "is of class 2, which the description does not list"),
        ("0.5 0.5 0.5 0.25 0.5", "is of class 0.5"),
        ("0 0,5 0,5 0,25 0,5", "'0,5', which is not a number"),
        ("0 nan 0.5 0.25 0.5", "'nan', which is not a number"),
        ("0 320 240 64 48", "320, which is outside 0 to 1: divide pixels"),
        ("0 1.5 0.5 0.25 0.5", "1.5, which is outside 0 to 1"),
    ],
)
def test_wrong_lines_are_named_with_file_line_and_remedy(make_yolo, tmp_path, line, why):
    root = make_yolo(train={"a": f"{ONE}{line}\n", "b": ONE})
    place = f"{root}/labels/train/a.txt:2: {line[:60]!r}"
    with pytest.raises(DataError) as caught:
        plan(f"yolo:{root}", str(tmp_path / "data"), DataConfig())
    assert place in caught.value.message and why in caught.value.message
    assert "1 of 3 boxes" in caught.value.message and "class x y width height" in caught.value.fix
    assert not (tmp_path / "data" / "images").exists()  # No image was fetched.
    planned = plan(f"yolo:{root}", str(tmp_path / "data"), DataConfig(max_bad_fraction=0.5))
    assert planned.problems[reasons.LABEL_LINE].count == 1
    with pytest.raises(DataError):  # A plan that already exists is no way around it.
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


@pytest.mark.slow
def test_from_a_bucket_to_shards(make_yolo, bucket, tmp_path):
    """All the way: a turned photograph keeps its box where people see it."""
    root = make_yolo(train={"a": ONE, "b": ONE}, val={"c": "1 0.25 0.125 0.5 0.25\n"})
    turned = Image.new("RGB", (40, 30))
    exif = turned.getexif()
    exif[0x0112] = 6  # Displayed as 30 x 40.
    turned.save(root / "images" / "val" / "c.jpg", exif=exif)
    shutil.copytree(root, bucket / "my" / "set")
    config = DataConfig(processes=1)
    raw = download("yolo:s3://bucket/my/set", str(tmp_path / "data"), config)
    assert raw.splits == {"train": SplitCounts(2, 2), "val": SplitCounts(1, 1)}
    index = shard(raw, str(tmp_path / "data"), config)
    _, record = ShardDataset(index.uri, "val").read(0)
    assert (record["width"], record["height"]) == (30, 40)
    assert record["annotations"][0]["bbox"] == [0, 0, 15, 10]
    assert index.problems == {reasons.CLASS_WITHOUT_BOXES: 1}
    shutil.copytree(root, bucket, dirs_exist_ok=True)
    assert names("s3://bucket") == names(root)
    with pytest.raises(DataError, match="on the web cannot be listed"):
        YoloSource("https://example.org/set").listing()


@pytest.mark.parametrize(
    ("data_yaml", "expected"),
    [
        ("[cat, dog]", ["cat", "dog"]),
        ("{0: cat, 1: dog}", ["cat", "dog"]),
        ("\n  1: dog\n  0: cat", ["cat", "dog"]),
        ("[no, 1]", ["no", "1"]),  # In YAML false and a number.
        ("\n- null\n- 'ë'", ["null", "ë"]),
    ],
)
def test_names_as_list_or_mapping(make_yolo, data_yaml, expected):
    root = make_yolo(f"train: images/train\nnames: {data_yaml}\n", train={"a": ONE})
    listing = YoloSource(str(root)).listing()
    assert [(category.name, category.original_id) for category in listing.categories] == [
        (name, number) for number, name in enumerate(expected)
    ]


def test_numbers_with_gaps_keep_their_classes(make_yolo):
    root = make_yolo("train: images/train\nnames: {2: cat, 7: dog}\n", train={"a": "7 0.5 0.5 0.1 0.1"})
    listing = YoloSource(str(root)).listing()
    (entry,) = entries_of(listing.splits["train"])
    assert listing.categories[entry.boxes[0].category][:2] == ("dog", 7)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("train: images/train\n", "has no list of names"),
        ("train: images/train\nnames: []\n", "lists no classes"),
        ("train: images/train\nnames: [a, a]\n", "2 classes are 'a'"),
        ("train: images/train\nnames: [[a], b]\n", "that is not a string"),
        ("train: images/train\nnames: {x: a}\n", "has no list of names"),
        ("train: images/train\nnc: 3\nnames: [a, b]\n", "nc is 3, but names has 2"),
        ("names: [a]\n", "has no key train"),
        ("train: {a: b}\nnames: [a]\n", "neither a path nor a list of paths"),
        ("train: images/nowhere\nnames: [a]\n", "no images for train: images/nowhere; looked at"),
        ("- a\n", "not a YOLO data set description"),
        ("names: [a\n", "is not YAML"),
        ("a: &a [*a, *a]\nnames: *a\ntrain: x\n", "no text|is not YAML"),
    ],
)
def test_descriptions_that_cannot_be_used(make_yolo, yaml, message):
    root = make_yolo(yaml, train={"a": ONE})
    with pytest.raises(DataError, match=message) as caught:
        YoloSource(str(root)).listing()
    assert "data.yaml" in caught.value.message and caught.value.fix


def test_classes_without_names_are_numbered(make_yolo):
    root = make_yolo("train: images/train\nnc: 2\n", train={"a": ONE})
    assert [one.name for one in YoloSource(str(root)).listing().categories] == ["class_0", "class_1"]


@pytest.mark.parametrize(
    "path", ["", ".", "{root}", "../yolo", "yolo", "/content/gone/elsewhere", "../datasets/coco8"]
)
def test_path_as_ultralytics_writes_it(make_yolo, path):
    root = make_yolo(train={"a": ONE}, val={"b": ONE})
    with (root / "data.yaml").open("a") as file:
        file.write(f"path: {path.format(root=root)}\ntest:\n")
    assert names(root) == {"train": ["images/train/a.jpg"], "val": ["images/val/b.jpg"]}


def test_roboflow_form(make_yolo):
    """Folders train, valid and test with images and labels each, and paths that begin with ../."""
    root = make_yolo(train={"a": ONE}, valid={"b": ONE}, test={"c": ONE})
    for split in ("train", "valid", "test"):
        for kind in ("images", "labels"):
            (root / split).mkdir(exist_ok=True)
            (root / kind / split).rename(root / split / kind)
    (root / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\n"
        "names: ['cat', 'dog']\n\nroboflow:\n  workspace: w\n  project: p\n  version: 1\n"
    )
    # A set of the same layout beside it is not meant.
    shutil.copytree(root / "train", root.parent / "train")
    assert names(root) == {
        "train": ["train/images/a.jpg"],
        "val": ["valid/images/b.jpg"],
        "test": ["test/images/c.jpg"],
    }
    assert all(entry.boxes for split in ("train", "val", "test") for entry in entries(root, split))


@pytest.mark.parametrize("line", ["./images/train/{}.jpg", "images/train/{}.jpg", "data/images/train/{}.jpg",
                                  "{root}/images/train/{}.jpg", "images\\train\\{}.jpg"])  # fmt: skip
def test_lists_of_images(make_yolo, line):
    root = make_yolo(
        "train: train.txt\nval: [val.txt, images/more]\nnames: [cat, dog]\n",
        train={"a": ONE, "b": ONE, "c": ""},
        more={"d": ONE},
    )
    lines = [line.format(stem, root=root) for stem in ("gone", "a", "c", "a")]
    (root / "train.txt").write_text("\n".join(lines) + "\n")
    (root / "val.txt").write_text(line.format("b", root=root) + "\n")
    listing = YoloSource(str(root)).listing()
    entry_by_name = {entry.file_name: entry for entry in entries_of(listing.splits["train"])}
    assert [name.rpartition("/")[2] for name in entry_by_name] == ["gone.jpg", "a.jpg", "c.jpg"]
    gone, a, c = entry_by_name.values()
    assert gone.fault[0] == reasons.IMAGE_MISSING and not a.fault and not c.fault
    assert len(a.boxes) == 1 and not c.boxes
    assert listing.problems.counts == {reasons.IMAGE_LISTED_TWICE: 1}
    assert names(root)["val"] == ["images/train/b.jpg", "images/more/d.jpg"]


def test_labels_beside_the_images_and_classes_txt(tmp_path, make_jpeg):
    """LabelImg's YOLO form: image, label file and classes.txt in one folder."""
    root = tmp_path / "set"
    root.mkdir()
    for stem in ("a", "train_2"):
        (root / f"{stem}.jpg").write_bytes(make_jpeg())
        (root / f"{stem}.txt").write_text(ONE)
    (root / "classes.txt").write_text("cat\ndog\n")
    assert names(root) == {"train": ["a.jpg", "train_2.jpg"]}
    assert all(len(entry.boxes) == 1 for entry in entries(root))
    assert sources.parse(str(root)) == YoloSource(str(root))


@pytest.mark.parametrize("given", ["{}", "{}/obj.names"])
def test_a_set_in_a_folder_called_labels_does_not_read_the_folder_above(tmp_path, make_jpeg, given):
    root = tmp_path / "set" / "labels"
    for stem, folder in (("mine", root), ("other", tmp_path / "set")):
        for kind in ("images", "labels"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / "images" / f"{stem}.jpg").write_bytes(make_jpeg())
        (folder / "labels" / f"{stem}.txt").write_text(ONE)
    (root / "obj.names").write_text("cat\n")
    assert names(given.format(root)) == {"train": ["images/mine.jpg"]}


def test_classes_txt_in_the_folder_of_each_split(tmp_path, make_jpeg):
    """LabelImg's YOLO form, where the splits were labeled one after the other."""
    root = tmp_path / "set"
    for split in ("train", "valid"):
        (root / split).mkdir(parents=True)
        (root / split / f"{split}.jpg").write_bytes(make_jpeg())
        (root / split / f"{split}.txt").write_text(ONE)
        (root / split / "classes.txt").write_text("cat\ndog\n")
    assert sources.parse(str(root)) == YoloSource(str(root))
    assert names(root) == {"train": ["train/train.jpg"], "val": ["valid/valid.jpg"]}
    (root / "valid" / "classes.txt").write_text("dog\ncat\n")
    with pytest.raises(DataError, match="name different classes"):
        YoloSource(str(root)).listing()


def test_darknet_form(tmp_path, make_jpeg):
    """CVAT's "YOLO 1.1": obj.names, train.txt with lines that begin with data/, obj_train_data."""
    root = tmp_path / "set"
    (root / "obj_train_data").mkdir(parents=True)
    (root / "obj_train_data" / "a.jpg").write_bytes(make_jpeg())
    (root / "obj_train_data" / "a.txt").write_text(ONE)
    (root / "obj.names").write_text("cat\ndog\n")
    (root / "obj.data").write_text("classes = 2\ntrain = data/train.txt\nnames = data/obj.names\n")
    (root / "train.txt").write_text("data/obj_train_data/a.jpg\n")
    (entry,) = entries(root)
    assert entry.file_name == "obj_train_data/a.jpg" and len(entry.boxes) == 1


def test_a_yaml_of_any_name_is_found_and_several_are_refused(make_yolo):
    root = make_yolo(train={"a": ONE})
    (root / "data.yaml").rename(root / "cards.yaml")
    (root / "hyp.yaml").write_text("lr0: 0.01\n")
    assert sources.parse(str(root)) == YoloSource(str(root)) and names(root)["train"]
    assert names(root / "cards.yaml") == names(root)
    shutil.copy(root / "cards.yaml", root / "other.yaml")
    with pytest.raises(DataError, match=r"several YOLO sets: cards\.yaml, other\.yaml"):
        YoloSource(str(root)).listing()


def test_a_set_without_labels_and_one_without_images(make_yolo):
    root = make_yolo(train={"a": None, "b": None})
    with pytest.raises(DataError, match=r"none of 2 images of train has a label file; .*labels/train/a"):
        YoloSource(str(root)).listing()
    shutil.rmtree(root / "images" / "train")
    (root / "images" / "train").mkdir()
    (root / "images" / "train" / "notes.md").write_text("x")
    with pytest.raises(DataError, match="no images in"):
        YoloSource(str(root)).listing()
