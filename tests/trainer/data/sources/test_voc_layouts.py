"""VOC's XML in the layouts that labelling tools and exports have, besides VOC's own."""

import shutil
from pathlib import Path

import pytest
from source_rows import entries_of

from trainer.data import problem_counts as reasons
from trainer.data import sources
from trainer.data.sources.voc import VocSource


def xml(name: str, label: str = "cat") -> str:
    """As LabelImg writes it."""
    return (
        f"<annotation><folder>x</folder><filename>{name}</filename><path>C:\\photos\\{name}</path><size>"
        f"<width>40</width><height>30</height><depth>3</depth></size><object><name>{label}</name><bndbox>"
        "<xmin>5</xmin><ymin>6</ymin><xmax>14</xmax><ymax>25</ymax></bndbox></object></annotation>"
    )


@pytest.fixture
def make_tree(tmp_path, make_jpeg):
    """Write files of the given paths: images, and XML files of the images of their stem."""

    def make(*paths: str, root: str = "set") -> Path:
        for number, path in enumerate(paths):
            file = tmp_path / root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".xml":
                file.write_text(xml(f"{file.stem}.jpg"))
            else:
                file.write_bytes(make_jpeg(seed=number))
        return tmp_path / root

    return make


def listed(root: Path) -> dict[str, dict[str, int]]:
    """Boxes of each image of each split; -1 of one that cannot be used."""
    listing = sources.parse(str(root)).listing()
    assert listing.read_as.startswith("VOC: ")
    return {
        split: {entry.file_name: -1 if entry.fault else len(entry.boxes) for entry in entries_of(rows)}
        for split, rows in listing.splits.items()
    }


def test_labels_beside_the_images(make_tree):
    """LabelImg's default: images/train/*.jpg and *.xml."""
    root = make_tree("images/train/a.jpg", "images/train/a.xml", "images/test/b.jpg", "images/test/b.xml",
                     "images/train/unlabelled.jpg")  # fmt: skip
    assert listed(root) == {"train": {"images/train/a.jpg": 1}, "test": {"images/test/b.jpg": 1}}
    listing = VocSource(str(root)).listing()
    assert listing.problems.counts == {reasons.IMAGE_WITHOUT_ANNOTATION: 1}
    assert listing.read_as == ("VOC: XML files beside the images, train of images/train; test of images/test")
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
    assert listing.problems.counts == {} and listing.read_as.endswith(", splits of ImageSets/Main")


def test_an_annotation_of_several_images_or_of_none_is_a_fault(make_tree):
    root = make_tree("labels/a.xml", "x/a.jpg", "y/a.jpg", "labels/b.xml", "labels/c.xml", "x/c.jpg")
    faults = {
        entry.file_name: entry.fault for entry in entries_of(VocSource(str(root)).listing().splits["train"])
    }
    assert faults == {
        "labels/a": (reasons.IMAGE_MISSING, "several images a.*, and none beside labels/a.xml"),
        "labels/b": (reasons.IMAGE_MISSING,
                     "no file b.* beside labels/b.xml or in another folder of its split"),
        "x/c.jpg": None,
    }  # fmt: skip


def test_other_xml_is_told_as_what_it_is(make_tree):
    root = make_tree("a.jpg", "a.xml")
    (root / "a.xml").write_text("<annotations><version>1.1</version></annotations>")
    (entry,) = entries_of(VocSource(str(root)).listing().splits["train"])
    assert "it is CVAT's own: export as COCO or VOC there" in entry.fault[1]


def test_a_tree_in_a_bucket(make_tree, bucket, make_jpeg):
    root = make_tree("train/a.jpg", "train/a.xml", "valid/b.jpg", "valid/b.xml")
    shutil.copytree(root, bucket / "labelled")
    source = sources.parse("s3://bucket/labelled")
    assert source == VocSource("s3://bucket/labelled")
    (entry,) = entries_of(source.listing().splits["val"])
    assert source.read(entry.origin) == make_jpeg(seed=2)


def test_a_stray_json_or_classes_txt_does_not_mislead(make_tree):
    root = make_tree("train/a.jpg", "train/a.xml")
    (root / "notes.json").write_text('{"info": 1}')
    assert sources.parse(str(root)) == VocSource(str(root))
