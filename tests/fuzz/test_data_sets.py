"""`kubedet data inspect` ends with a message and a remedy, whatever a data set's files hold."""

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from hostile import as_json, damaged, deep, examples, refused, spoiled, values
from hypothesis import example, given
from hypothesis import strategies as st
from openimages_mirror import mirror  # noqa: F401 (a fixture)
from PIL import Image

COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 40, "height": 30}, {"id": 2, "file_name": "b.jpg"}],
    "categories": [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 7, "bbox": [1, 2, 20, 10], "area": 200.5, "iscrowd": 0},
        {
            "id": 2,
            "image_id": 2,
            "category_id": 9,
            "bbox": [3.5, 2, 9, 9],
            "segmentation": {"size": [30, 40], "counts": [600, 600]},
        },
        {"id": 3, "image_id": 2, "category_id": 7, "segmentation": [[1, 1, 9, 1, 9, 9]]},
    ],
}
VOC = """<annotation><folder>x</folder><filename>a.jpg</filename><size><width>40</width><height>30</height>
<depth>3</depth></size><object><name>cat</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin>
<xmax>20</xmax><ymax>12</ymax></bndbox></object></annotation>"""
YOLO = b"path: .\ntrain: images/train\nval: images/val\nnc: 2\nnames:\n  0: cat\n  1: dog\n"
LABELS = b"0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.3 0.1 0.3 0.3\n"


@pytest.fixture(scope="module")
def jpeg():
    """A small image."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def make_jpeg(jpeg):
    """Used by the mirror of Open Images."""
    return lambda **_: jpeg


@pytest.fixture
def coco(tmp_path, jpeg):
    """Inspects a folder with two images and the given annotations."""
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(jpeg)

    def inspect(content: bytes, capsys: object, *words: str) -> str:
        (tmp_path / "train.json").write_bytes(content)
        return refused("data", "inspect", f"coco:{tmp_path}/train.json", *words, capsys=capsys)

    return inspect


@pytest.mark.slow
@examples(40)
@given(spoiled(COCO), st.sampled_from(["bbox", "segmentation"]))
def test_coco(coco, capsys, tree, boxes_from):
    coco(as_json(tree), capsys, "--set", f"data.boxes_from={boxes_from}")


@examples(30)
@given(st.one_of(damaged(as_json(COCO)), deep.map(str.encode), values.map(as_json)))
def test_bytes_of_coco(coco, capsys, content):
    coco(content, capsys)


@pytest.mark.parametrize("side", [2**31 - 1, 2**31, 2**32, 10**12, 10**30, 10**400])
def test_huge_widths_in_coco(coco, capsys, side):
    images = [COCO["images"][0] | {"width": side, "height": side}, COCO["images"][1]]
    tree = COCO | {"images": images, "annotations": COCO["annotations"][:2]}
    assert not coco(as_json(tree), capsys)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
@pytest.mark.parametrize("where", ["images", "categories", "annotations"])
def test_coco_ids_above_64_bits(coco, capsys, number, where):
    tree = COCO | {where: [COCO[where][0] | {"id": number}, *COCO[where][1:]]}
    assert "boxes are bad" in coco(as_json(tree), capsys)  # It is read: the third has no box.


@pytest.mark.slow
@examples(20)
@given(damaged(VOC.encode()))
@example(b"<a>" * 100_000)
@example(b"<annotation>" + b"<object>" * 50_000)
@example(b'<?xml version="1.0" encoding="x-nothing"?><annotation/>')
@example(b'<!DOCTYPE a [<!ENTITY b "b">]><annotation>&b;</annotation>')
def test_voc(tmp_path, jpeg, capsys, content):
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "JPEGImages" / "a.jpg").write_bytes(jpeg)
    (tmp_path / "Annotations" / "a.xml").write_bytes(content)
    refused("data", "inspect", f"voc:{tmp_path}", capsys=capsys)


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (98 + level, 98 + level, b",".join([b"*%c" % (97 + level)] * 9)) for level in range(8)
)


@pytest.mark.slow
@examples(20)
@given(damaged(YOLO), damaged(LABELS))
@example(BOMB + b"path: *i\ntrain: *i\nnames: *i\n", LABELS)
@example(b"train: .\nnc: 999999999999\n", LABELS)
@example(b"train: .\nnc: " + b"9" * 5000, LABELS)
@example(b"train: .\nnames: {" + b"9" * 5000 + b": a}\n", LABELS)
@example(b"[" * 50_000, LABELS)
@example(YOLO, b"1e999 nan inf -inf 1_0\n" + b"9" * 5000 + b" 0 0 0 0\n")
@example(YOLO, b"0 " + b"0.5 " * 30_000)
def test_yolo(tmp_path, jpeg, capsys, described, labels):
    for split in ("train", "val"):
        for folder in ("images", "labels"):
            (tmp_path / folder / split).mkdir(exist_ok=True, parents=True)
        (tmp_path / "images" / split / "a.jpg").write_bytes(jpeg)
        (tmp_path / "labels" / split / "a.txt").write_bytes(labels)
    (tmp_path / "data.yaml").write_bytes(described)
    refused("data", "inspect", f"yolo:{tmp_path}", capsys=capsys)


@pytest.mark.slow
def test_csv_and_hierarchies_of_open_images(mirror, capsys):  # noqa: F811
    files = sorted(path for path in (mirror / "base").rglob("*") if path.is_file())
    whole = {path: path.read_bytes() for path in files}

    @examples(20)
    @given(st.data(), st.sampled_from(files))
    def inspect(data, path):
        path.write_bytes(data.draw(damaged(whole[path])))
        try:
            text = f"openimages:base={mirror}/base,pixels={mirror}/pixels"
            refused("data", "inspect", text, capsys=capsys)
        finally:
            path.write_bytes(whole[path])

    inspect()


def packed(kind: str, jpeg: bytes) -> bytes:
    """A YOLO set as a zip or tar."""
    buffer = io.BytesIO()
    files = {"data.yaml": YOLO, "images/train/a.jpg": jpeg, "labels/train/a.txt": LABELS,
             "images/val/b.jpg": jpeg, "labels/val/b.txt": LABELS}  # fmt: skip
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=buffer, mode=f"w:{kind.removeprefix('tar').removeprefix('.')}") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives(tmp_path, jpeg, capsys, kind):
    whole = packed(kind, jpeg)
    numbers = iter(range(10**9))

    @examples(20)
    @given(damaged(whole))
    def inspect(content):
        path = tmp_path / f"{next(numbers)}.{kind}"  # One that is unpacked is not looked at again.
        path.write_bytes(content)
        refused("data", "inspect", str(path), capsys=capsys)
        path.unlink()

    inspect()


def test_file_names_that_are_not_utf_8(tmp_path, jpeg, capsys):
    for split in ("train", "val"):
        for folder, content in (("images", jpeg), ("labels", LABELS)):
            (tmp_path / folder / split).mkdir(parents=True)
            for name in ("a", os.fsdecode(b"\xff\xfe")):
                suffix = "jpg" if folder == "images" else "txt"
                (tmp_path / folder / split / f"{name}.{suffix}").write_bytes(content)
    (tmp_path / "data.yaml").write_bytes(YOLO)
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    Path(odd).write_text("{}")
    # A table holds text: these images cannot be read, here as in a run.
    message = refused("data", "inspect", str(tmp_path), capsys=capsys, codes=(2,))
    assert "2 of 6 images are bad" in message
    output = tmp_path / "out"
    code = refused("data", "preview", str(tmp_path), "-o", f"{output}/p.png", capsys=capsys, codes=(0,))
    assert code == ""
    shutil.rmtree(output)
