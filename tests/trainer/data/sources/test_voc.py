import shutil
from pathlib import Path

import pytest
from source_rows import entries_of

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.download import plan
from trainer.data.sources.source import UNKNOWN
from trainer.data.sources.voc import VocSource


def xml(*objects: str, size: str = "<size><width>40</width><height>30</height></size>") -> str:
    return f"<annotation><filename>x.jpg</filename>{size}{''.join(objects)}</annotation>"


def obj(name: str = "cat", box: str = "5 6 14 25", extra: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box.split(), strict=True)
    corners = "".join(f"<{tag}>{value}</{tag}>" for tag, value in sides)
    return f"<object><name>{name}</name>{extra}<bndbox>{corners}</bndbox></object>"


@pytest.fixture
def make_voc(tmp_path, make_jpeg):
    def make(annotations: dict[str, str], **splits: list[str]) -> Path:
        root = tmp_path / "voc"
        for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for stem, text in annotations.items():
            (root / "Annotations" / f"{stem}.xml").write_text(text)
            (root / "JPEGImages" / f"{stem}.jpg").write_bytes(make_jpeg())
        for split, lines in splits.items():
            (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(lines) + "\n")
        return root

    return make


def entries(root: Path, split: str = "train") -> list:
    return entries_of(VocSource(str(root)).listing().splits[split])


@pytest.mark.parametrize(
    ("corners", "bbox"),
    [
        ("1 1 40 30", (0, 0, 40, 30)),  # from the first to the last pixel: the whole image
        ("5 6 14 25", (4, 5, 10, 20)),
        ("5.5 6 14.5 25", (4.5, 5, 10, 20)),
        ("7 7 7 7", (6, 6, 0, 0)),  # coinciding corners have no area
        ("9 6 5 25", (8, 5, 0, 20)),
    ],
)
def test_corners_become_boxes(make_voc, corners, bbox):
    (entry,) = entries(make_voc({"a": xml(obj(box=corners))}))
    assert entry.boxes[0].bbox == bbox


def test_normalised_corners_are_refused_as_those_of_coco_are(make_voc, tmp_path):
    root = make_voc({f"{number}": xml(*[obj(box="0.1 0.2 0.6 0.9")] * 3) for number in range(8)})
    with pytest.raises(DataError, match="normalised") as caught:
        plan(f"voc:{root}", str(tmp_path / "data"), DataConfig())
    assert "xmin" in caught.value.fix


def test_a_size_that_no_image_has_is_no_sentinel(make_voc):
    size = "<size><width>-3</width><height>-3</height></size>"
    (entry,) = entries(make_voc({"a": xml(obj(), size=size)}))
    assert (entry.width, entry.height) == (-1, -1)


def test_difficult_objects_are_ignored_in_scoring(make_voc):
    hard = "<difficult>1</difficult>"
    objects = obj(), obj("", extra=hard), obj(extra=hard.replace("1", "0"))
    (entry,) = entries(make_voc({"a": xml(*objects)}))
    assert [(box.category, box.iscrowd) for box in entry.boxes] == [(0, 0), (UNKNOWN, 1), (0, 0)]


def test_classes_are_those_of_all_splits_in_alphabetical_order(make_voc):
    root = make_voc({"a": xml(obj("zebra")), "b": xml(obj("ape"))}, train=["a"], val=["b"])
    listing = VocSource(str(root)).listing()
    assert [category.name for category in listing.categories] == ["ape", "zebra"]
    assert entries_of(listing.splits["train"])[0].boxes[0].category == 1


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("<object><name>cat</name></object>", reasons.BOX_ABSENT),
        ("<object><name>cat</name><bndbox/></object>", reasons.BOX_ABSENT),
        (obj(box="5,5 6 14 25"), reasons.BOX_NOT_FINITE),
        (obj(box="nan 6 5 25"), reasons.BOX_NOT_FINITE),
    ],
)
def test_objects_without_a_box_are_named(make_voc, item, reason):
    root = make_voc({"a": xml(obj(), item), "b": xml(obj())})
    listing = VocSource(str(root)).listing()
    assert [len(entry.boxes) for entry in entries_of(listing.splits["train"])] == [1, 1]
    assert listing.problems.examples == {reason: [f"object 2 (cat) in {root}/Annotations/a.xml"]}


def test_a_layout_below_the_folder_that_is_named(make_voc, make_jpeg):
    """Its lists are read, and images beside those of JPEGImages do not compete."""
    root = make_voc({"a": xml(obj()), "b": xml(obj())}, train=["# two", "a"], val=["b"], test=[])
    (root / "SegmentationClass").mkdir()
    (root / "SegmentationClass" / "a.png").write_bytes(make_jpeg())
    expected = {"train": {"a.jpg": 1}, "val": {"b.jpg": 1}}
    assert listed(root) == listed(root.parent) == expected
    assert VocSource(str(root)).listing().problems.counts == {reasons.SPLIT_EMPTY: 1}
    shutil.rmtree(root / "ImageSets")
    names = {f"voc/JPEGImages/{stem}.jpg": 1 for stem in "ab"}
    assert listed(root.parent) == {"train": names}


def test_split_lists(make_voc):
    annotated = {stem: xml(obj()) for stem in ("a", "b c", "d.e", "f")}
    root = make_voc(annotated, train=["a  1", "b c", "a"], val=["d.e.jpg"], test=["JPEGImages/f.jpg"])
    listing = VocSource(str(root)).listing()
    assert {split: [e.file_name for e in entries_of(rows)] for split, rows in listing.splits.items()} == {
        "train": ["a.jpg", "b c.jpg"],
        "val": ["d.e.jpg"],
        "test": ["f.jpg"],
    }


def test_trainval_stands_in_for_train(make_voc):
    annotated = {stem: xml(obj()) for stem in "abc"}
    root = make_voc(annotated, trainval=["a", "b", "c"], val=["b"])
    listing = VocSource(str(root)).listing()
    assert [entry.file_name for entry in entries_of(listing.splits["train"])] == ["a.jpg", "c.jpg"]


def test_what_a_split_names_but_is_not_there_is_a_fault(make_voc):
    root = make_voc({"a": xml(obj()), "b": xml(obj())}, train=["a", "b", "ghost"])
    (root / "Annotations" / "b.xml").unlink()
    faults = {entry.file_name: entry.fault for entry in entries(root)}
    assert faults["a.jpg"] is None
    assert faults["b.jpg"] == (reasons.IMAGE_UNREADABLE, "no Annotations/b.xml")
    assert faults["ghost"][0] == reasons.IMAGE_MISSING


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<annotation><object>", "no element found"),
        ("", "no element found"),
        ("<html></html>", "the root is <html>"),
        ('<?xml version="1.0" encoding="gb2312"?><annotation/>', "gb2312: save it as UTF-8"),
        ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + xml(obj("&x;")), "DOCTYPE"),
        ('<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a [<!ENTITY x "">]>' + xml(obj("&x;")), "DOCTYPE"),
    ],
)
def test_unusable_annotations_are_a_fault(make_voc, text, reason):
    root = make_voc({"a": xml(obj()), "b": ""})
    (root / "Annotations" / "b.xml").write_text(text, "utf-16" if "utf-16" in text else "utf-8")
    fault = entries(root)[1].fault
    assert fault[0] == reasons.IMAGE_UNREADABLE and reason in fault[1]


def test_a_folder_that_is_not_voc(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="contains no XML files"):
        sources.parse(f"voc:{tmp_path}").listing()
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text(xml(obj()))
    with pytest.raises(DataError, match="no images in JPEGImages"):
        sources.parse(f"voc:{tmp_path}").listing()


def test_of_two_files_of_a_stem_the_annotation_names_one(make_voc, make_jpeg):
    annotation = xml(obj()).replace("x.jpg", "a.png")
    root = make_voc({"a": annotation, "b": annotation})
    for name in ("a.png", "b.bmp"):
        (root / "JPEGImages" / name).write_bytes(make_jpeg(seed=9))
    assert [entry.file_name for entry in entries(root)] == ["a.png", "b.bmp"]


@pytest.fixture
def make_tree(tmp_path, make_jpeg):
    """Write images and XML files at the given paths."""

    def make(*paths: str) -> Path:
        for number, path in enumerate(paths):
            file = tmp_path / "set" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".xml":
                file.write_text(xml(obj()))
            else:
                file.write_bytes(make_jpeg(seed=number))
        return tmp_path / "set"

    return make


def listed(root: Path) -> dict[str, dict[str, int]]:
    """Boxes of each image of each split; -1 if an image cannot be used."""
    listing = sources.parse(str(root)).listing()
    return {
        split: {entry.file_name: -1 if entry.fault else len(entry.boxes) for entry in entries_of(rows)}
        for split, rows in listing.splits.items()
    }


def test_labels_beside_the_images(make_tree):
    """LabelImg's default: images/train/*.jpg and *.xml."""
    root = make_tree("images/train/a.jpg", "images/train/a.xml", "images/test/b.jpg", "images/test/b.xml",
                     "images/train/unlabeled.jpg")  # fmt: skip
    assert listed(root) == {"train": {"images/train/a.jpg": 1}, "test": {"images/test/b.jpg": 1}}
    listing = VocSource(str(root)).listing()
    assert listing.problems.counts == {reasons.IMAGE_WITHOUT_ANNOTATION: 1}
    assert listing.read_as == "VOC: train of images/train; test of images/test"
    assert listed(root / "images") == {"train": {"train/a.jpg": 1}, "test": {"test/b.jpg": 1}}
    assert listed(root / "images" / "train") == {"train": {"a.jpg": 1}}


@pytest.mark.parametrize(
    ("paths", "splits"),
    [
        (("train/a.jpg", "train/a.xml", "valid/b.jpg", "valid/b.xml", "test/c.jpg", "test/c.xml"),
         {"train": ["train/a.jpg"], "val": ["valid/b.jpg"], "test": ["test/c.jpg"]}),  # Roboflow's export
        (("train/images/a.jpg", "train/annotations/a.xml", "val/images/a.jpg", "val/annotations/a.xml"),
         {"train": ["train/images/a.jpg"], "val": ["val/images/a.jpg"]}),
        (("images/train/a.jpg", "annotations/train/a.xml", "images/val/a.jpg", "annotations/val/a.xml"),
         {"train": ["images/train/a.jpg"], "val": ["images/val/a.jpg"]}),
        (("train/Annotations/a.xml", "train/JPEGImages/A.JPG"), {"train": ["train/JPEGImages/A.JPG"]}),
        (("images/a.jpg", "xmls/a.xml"), {"train": ["images/a.jpg"]}),
        (("photos/x/a.jpg", "photos/x/a.xml", "photos/y/a.jpg", "photos/y/a.xml"),
         {"train": ["photos/x/a.jpg", "photos/y/a.jpg"]}),
        (("training_set/a.jpg", "training_set/a.xml", "Validation/b.jpg", "Validation/b.xml"),
         {"train": ["training_set/a.jpg"], "val": ["Validation/b.jpg"]}),
        (("trains/a.jpg", "trains/a.xml", "value/b.jpg", "value/b.xml"),  # No names of splits.
         {"train": ["trains/a.jpg", "value/b.jpg"]}),
        (("a.jpg", "a.xml", "test/b.jpg", "test/b.xml"), {"train": ["a.jpg"], "test": ["test/b.jpg"]}),
        (("a.jpg", "a.xml", "__MACOSX/._a.xml", ".trash/b.xml", ".trash/b.jpg"), {"train": ["a.jpg"]}),
        (("Annotations/a.xml", "images/train/a.jpg"), {"train": ["images/train/a.jpg"]}),
    ],
)  # fmt: skip
def test_layouts(make_tree, paths, splits):
    assert listed(make_tree(*paths)) == {split: dict.fromkeys(names, 1) for split, names in splits.items()}


def test_lists_decide_where_there_are_some(make_tree):
    root = make_tree("photos/a.jpg", "photos/a.xml", "photos/b.jpg", "photos/b.xml", "photos/c.jpg",
                     "photos/c.xml")  # fmt: skip
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("a\nghost\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("b\n")
    assert listed(root) == {"train": {"photos/a.jpg": 1, "ghost": -1}, "val": {"photos/b.jpg": 1}}
    listing = VocSource(str(root)).listing()
    assert listing.problems.counts == {} and listing.read_as == "VOC: splits of ImageSets/Main"


def test_an_annotation_of_several_images_or_of_none_is_a_fault(make_tree):
    root = make_tree("labels/a.xml", "x/a.jpg", "y/a.jpg", "labels/b.xml", "labels/c.xml", "x/c.jpg")
    assert {entry.file_name: entry.fault for entry in entries(root)} == {
        "labels/a": (reasons.IMAGE_MISSING, "several images a.*, and none next to labels/a.xml"),
        "labels/b": (
            reasons.IMAGE_MISSING,
            "no file b.* next to labels/b.xml or in another folder of its split",
        ),
        "x/c.jpg": None,
    }


def test_a_stray_json_or_classes_txt_does_not_mislead(make_tree):
    root = make_tree("train/a.jpg", "train/a.xml")
    (root / "notes.json").write_text('{"info": 1}')
    assert sources.parse(str(root)) == VocSource(str(root))
