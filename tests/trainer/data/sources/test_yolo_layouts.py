"""YOLO data sets as Ultralytics, Roboflow, Darknet and labelling tools lay them out."""

import shutil

import pytest
from source_rows import entries_of
from yolo_sets import ONE, entries, names

from trainer.base.errors import DataError
from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.sources.yolo import YoloSource


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
    assert listing.categories[entry.boxes[0].category] == ("dog", 7)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("train: images/train\n", "has no names"),
        ("train: images/train\nnames: []\n", "names no classes"),
        ("train: images/train\nnames: [a, a]\n", "2 classes are 'a'"),
        ("train: images/train\nnames: [[a], b]\n", "that is no text"),
        ("train: images/train\nnames: {x: a}\n", "has no names that are a list"),
        ("train: images/train\nnc: 3\nnames: [a, b]\n", "nc is 3, but names has 2"),
        ("names: [a]\n", "names no train"),
        ("train: {a: b}\nnames: [a]\n", "no path and no list of paths"),
        ("train: images/nowhere\nnames: [a]\n", "no images for train: images/nowhere; looked at"),
        ("- a\n", "no description of a YOLO set"),
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
        "train": ["train/images/a.jpg"], "val": ["valid/images/b.jpg"], "test": ["test/images/c.jpg"],
    }  # fmt: skip
    assert all(entry.boxes for split in ("train", "val", "test") for entry in entries(root, split))


@pytest.mark.parametrize("line", ["./images/train/{}.jpg", "images/train/{}.jpg", "data/images/train/{}.jpg",
                                  "{root}/images/train/{}.jpg", "images\\train\\{}.jpg"])  # fmt: skip
def test_lists_of_images(make_yolo, line):
    root = make_yolo("train: train.txt\nval: [val.txt, images/more]\nnames: [cat, dog]\n",
                     train={"a": ONE, "b": ONE, "c": ""}, more={"d": ONE})  # fmt: skip
    lines = [line.format(stem, root=root) for stem in ("gone", "a", "c", "a")]
    (root / "train.txt").write_text("\n".join(lines) + "\n")
    (root / "val.txt").write_text(line.format("b", root=root) + "\n")
    listing = YoloSource(str(root)).listing()
    entry_by_name = {entry.file_name: entry for entry in entries_of(listing.splits["train"])}
    assert [name.rpartition("/")[2] for name in entry_by_name] == ["gone.jpg", "a.jpg", "c.jpg"]
    assert [entry.fault and entry.fault[0] for entry in entry_by_name.values()] == [
        reasons.IMAGE_MISSING,
        None,
        None,
    ]
    assert (
        len(entry_by_name["images/train/a.jpg"].boxes) == 1 and not entry_by_name["images/train/c.jpg"].boxes
    )
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


def test_classes_txt_in_the_folder_of_each_split(tmp_path, make_jpeg):
    """LabelImg's YOLO form, where the splits were labelled one after the other."""
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
