import csv
import http.server
import json
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from trainer.config import DataConfig
from trainer.data import problems as reasons
from trainer.data import sources
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.sources import openimages_csv
from trainer.data.sources.base import UNKNOWN
from trainer.data.sources.openimages import (
    BOXES,
    DESCRIPTIONS,
    HIERARCHY,
    LABELS,
    ROTATIONS,
    OpenImagesSource,
)
from trainer.data.sources.openimages_mlperf import CLASSES
from trainer.errors import DataError
from trainer.evaluation.openimages import image_labels

BOX_COLUMNS = [
    "ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax",
    "IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside",
]  # fmt: skip
CLICKS = [f"XClick{number}{axis}" for axis in "XY" for number in (1, 2, 3, 4)]
MIDS = {
    "Animal": "/m/0jbk", "Cat": "/m/01yrx", "Dog": "/m/0bt9lr", "Person": "/m/01g317", "Man": "/m/04yx4",
    "Tree, large": "/m/07j7r",
}  # fmt: skip
BELOW = {
    "/m/0bl9f": ["Animal", "Person", "Tree, large"], "Animal": ["Cat", "Dog"], "Person": ["Man"],
}  # fmt: skip
IDS = {
    "train": ["000002b66c9c498e", "000002b97e5471a0", "000002c707c9895e", "0000048549557964"],
    "validation": ["0001eeaf4aed83f9", "00075905539074f2", "0007cebe1b2ba653"],
    "test": ["000026e7ee790996", "000062a39995e348"],
}


def box(image_id: str, name: str, corners=(0.1, 0.6, 0.2, 0.9), group: int = 0) -> list[object]:
    return [image_id, "xclick", MIDS.get(name, name), 1, *corners, 0, 1, group, 0, -1]


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def hierarchy(name: str) -> dict:
    node: dict = {"LabelName": MIDS.get(name, name)}
    if name in BELOW:
        node["Subcategory"] = [hierarchy(child) for child in BELOW[name]]
    return node


BOX_ROWS = {
    "train": [
        box(IDS["train"][0], "Cat"), box(IDS["train"][0], "Man", (0.5, 0.75, 0.25, 0.5), 1),
        box(IDS["train"][1], "Dog"), box(IDS["train"][2], "Tree, large"), box(IDS["train"][3], "Animal"),
    ],
    "validation": [box(IDS["validation"][0], "Cat"), box(IDS["validation"][1], "Person")],
    "test": [box(IDS["test"][0], "Cat"), box(IDS["test"][1], "Dog"), box(IDS["test"][1], "/m/unheard")],
}  # fmt: skip


@pytest.fixture
def mirror(tmp_path, make_jpeg) -> Path:
    """The files of Open Images under base/ in their places, and pixels/<split>/<id>.jpg of 40x30."""
    base = tmp_path / "base"
    write_csv(base / DESCRIPTIONS, ["LabelName", "DisplayName"], [[mid, name] for name, mid in MIDS.items()])
    (base / HIERARCHY).parent.mkdir()
    (base / HIERARCHY).write_text(json.dumps(hierarchy("/m/0bl9f")))
    for split, rows in BOX_ROWS.items():
        clicks = CLICKS if split == "train" else []
        write_csv(base / BOXES[split], BOX_COLUMNS + clicks, [row + [0.5] * len(clicks) for row in rows])
        ids = [[image_id, 90.0 * number] for number, image_id in enumerate(IDS[split])]
        ids[-1][1] = ""
        write_csv(base / ROTATIONS[split], ["ImageID", "Rotation"], ids)
        for number, image_id in enumerate(IDS[split]):
            path = tmp_path / "pixels" / split / f"{image_id}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_jpeg(seed=number))
    for split, path in LABELS.items():
        said = [[image_id, "verification", MIDS["Dog"], 0] for image_id in IDS[split]]
        said += [[IDS[split][0], "verification", MIDS["Cat"], 1], [IDS[split][0], "x", "/m/other", 1]]
        said.append([IDS[split][-1], "verification", MIDS["Animal"], 0])
        write_csv(base / path, ["ImageID", "Source", "LabelName", "Confidence"], said)
    return tmp_path


def source(mirror: Path | str, text: str = "") -> OpenImagesSource:
    found = sources.parse(f"openimages:base={mirror}/base/,pixels={mirror}/pixels,{text}")
    assert isinstance(found, OpenImagesSource)
    return found


def rows_of(mirror: Path | str, text: str = "") -> dict[str, list[dict]]:
    splits = source(mirror, text).listing().splits
    return {
        split: [row for batch in rows.batches() for row in batch.to_pylist()]
        for split, rows in splits.items()
    }


def labels(row: dict) -> list[int]:
    return [box["category"] for box in row["boxes"]]


def test_what_a_row_tells(mirror):
    listing = source(mirror).listing()
    assert [tuple(category) for category in listing.categories] == list(MIDS.items())
    assert list(listing.splits) == ["train", "val", "test"] and not listing.exhaustive
    first = rows_of(mirror)["train"][0]
    cat, crowd = first.pop("boxes")
    assert first == {
        "file_name": "000002b66c9c498e.jpg", "version": "", "width": 1, "height": 1, "orientation": 1,
        "origin": f"{mirror}/pixels/train/000002b66c9c498e.jpg", "original_id": '"000002b66c9c498e"',
        "fault_reason": "", "fault_detail": "", "extra": "",
    }  # fmt: skip
    assert [cat[name] for name in "xywh"] == pytest.approx([0.1, 0.2, 0.5, 0.7])
    assert (cat["category"], cat["iscrowd"], crowd["category"], crowd["iscrowd"]) == (1, 0, 4, 1)
    assert source(mirror).read(first["origin"]) == Path(first["origin"]).read_bytes()


def test_unknown_classes_are_told_and_verified_ones_are_kept(mirror):
    found = rows_of(mirror)
    assert labels(found["test"][1]) == [2, UNKNOWN]
    assert [row["extra"] for row in found["train"]] == [""] * 4
    assert [json.loads(row["extra"])["verified"] for row in found["val"]] == [
        {"Cat": 1, "Dog": 0}, {"Dog": 0}, {"Dog": 0, "Animal": 0},
    ]  # fmt: skip
    # The last has verified classes alone, and no row among the boxes.
    assert [len(row["boxes"]) for row in found["val"]] == [1, 1, 0]
    assert [row["extra"] for row in rows_of(mirror, "labels=none")["val"]] == ["", ""]


def test_the_hierarchy_gives_boxes_of_the_classes_above(mirror):
    found = rows_of(mirror, "hierarchy=expand")
    assert [labels(row) for row in found["train"]] == [[1, 0, 4, 3], [2, 0], [5], [0]]
    assert [box["iscrowd"] for box in found["train"][0]["boxes"]] == [0, 0, 1, 1]
    assert source(mirror, "hierarchy=expand").listing().hierarchy == {}
    # What is in the image holds for the classes above, what is not for those below.
    first, _, last = (json.loads(row["extra"])["verified"] for row in found["val"])
    assert first == {"Cat": 1, "Animal": 1, "Dog": 0} and last == {"Animal": 0, "Cat": 0, "Dog": 0}


def test_evaluation_learns_the_hierarchy_of_the_classes_kept(mirror, tmp_path):
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["Dog", "Cat", "Animal", "Tree, large"])
    raw = download(source(mirror).uri, str(tmp_path / "data"), config)
    index = shard(raw, str(tmp_path / "data"), config)
    assert raw["hierarchy"] == index["hierarchy"] == {"0": [2], "1": [2]}
    for split in ("train", "test"):
        truth = ShardDataset(index["uri"], split).annotations()
        assert truth["hierarchy"] == {"0": [2], "1": [2]}
        assert [one["original_id"] for one in truth["categories"]] == [
            MIDS[name] for name in config.classes
        ]  # fmt: skip
    # An object is one box; what is verified holds above and below: Cat is there, Dog not, Animal not.
    assert [len(truth["annotations"]), *(image["verified"] for image in truth["images"])] == [
        2, [0, 1, 2], [0, 1, 2],
    ]  # fmt: skip
    labels_of, above = image_labels(truth)
    assert labels_of is not None and above == {0: [2], 1: [2]}
    assert image_labels(ShardDataset(index["uri"], "train").annotations())[0] is None


def test_rotation_becomes_an_orientation(mirror):
    assert [row["orientation"] for row in rows_of(mirror, "rotation=apply")["train"]] == [1, 8, 3, 1]


def test_splits_and_a_list_of_images(mirror, tmp_path):
    assert list(rows_of(mirror, "splits=train+test")) == ["train", "test"]
    (lone,) = rows_of(mirror, "splits=validation").items()
    assert lone[0] == "train" and len(lone[1]) == 3
    ids = tmp_path / "ids.txt"
    ids.write_text("train/000002c707c9895e\r\n\nvalidation/0001eeaf4aed83f9\ntrain/ffffffffffffffff\n")
    found = rows_of(mirror, f"images={ids}")
    names = {split: [row["original_id"].strip('"') for row in rows] for split, rows in found.items()}
    assert names == {"train": ["000002c707c9895e", "ffffffffffffffff"], "val": ["0001eeaf4aed83f9"]}
    assert [len(row["boxes"]) for row in found["train"]] == [1, 0]


@pytest.mark.parametrize("text", ["", "train\n", "train/../x\n", "challenge2018/000002c707c9895e\n"])
def test_lists_that_are_none(mirror, tmp_path, text):
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(DataError, match=r"ids\.txt") as caught:
        source(mirror, f"images={tmp_path}/ids.txt").listing()
    assert "train/" in caught.value.fix


@pytest.mark.parametrize(
    "text", ["splits=val", "splits=", "subset=coco", "classes=Cat", "hierarchy", "rotation=90"]
)
def test_parameters_that_do_not_exist(text):
    with pytest.raises(DataError, match="cannot use") as caught:
        sources.parse(f"openimages:{text}")
    assert "splits=train+validation+test" in caught.value.fix and "subset=all|mlperf" in caught.value.fix


def test_its_uri_means_the_same_again(mirror, monkeypatch):
    monkeypatch.chdir(mirror)
    found = sources.parse("openimages:subset=mlperf,base=base,splits=train")
    assert found.uri == f"openimages:splits=train,subset=mlperf,base={mirror}/base"
    assert sources.parse(found.uri) == found and sources.parse("openimages:").uri == "openimages:"


def test_files_that_are_missing_or_of_another_form(mirror, monkeypatch):
    (mirror / "base" / LABELS["test"]).unlink()
    with pytest.raises(DataError, match=r"no file .*oidv7-test") as caught:
        source(mirror).listing()
    assert "labels=none" in caught.value.fix
    path = mirror / "base" / BOXES["train"]
    path.write_text(path.read_text().replace("XMin", "Left"))
    with pytest.raises(DataError, match=r"cannot be read: .*XMin"):
        rows_of(mirror, "splits=train")
    path.write_text(path.read_text().replace("Left", "XMin").replace("0.75", "wide"))
    with pytest.raises(DataError, match=r"cannot be read: .*wide"):
        rows_of(mirror, "splits=train")
    write_csv(path, BOX_COLUMNS, [*BOX_ROWS["train"], BOX_ROWS["train"][0]])
    assert [labels(row) for row in rows_of(mirror, "splits=train")["train"]] == [[1, 4, 1], [2], [5], [0]]
    monkeypatch.setattr(openimages_csv, "_SORTABLE", 10)
    with pytest.raises(DataError, match="do not follow each other"):
        rows_of(mirror, "splits=train")
    (mirror / "base" / HIERARCHY).unlink()
    with pytest.raises(DataError, match=r"no file .*hierarchy") as caught:
        source(mirror, "splits=train").listing()
    assert "hierarchy=none" in caught.value.fix
    assert source(mirror, "splits=train,hierarchy=none").listing().hierarchy == {}
    (mirror / "base" / HIERARCHY).write_text("[]")
    with pytest.raises(DataError, match="no hierarchy"):
        source(mirror, "splits=train,hierarchy=expand").listing()
    (mirror / "base" / DESCRIPTIONS).write_text("1,2,3\n")
    with pytest.raises(DataError, match="display name"):
        source(mirror, "splits=train").listing()


def test_descriptions_without_a_header(mirror):
    path = mirror / "base" / DESCRIPTIONS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert len(source(mirror, "labels=none").listing().categories) == len(MIDS)


def test_the_subset_of_mlperf(mirror):
    assert len(set(CLASSES)) == 264
    with pytest.raises(DataError, match="describes no class Airplane"):
        source(mirror, "subset=mlperf").listing()
    described = [[f"/m/{number:04}", name] for number, name in enumerate((*CLASSES, "Animal"))]
    write_csv(mirror / "base" / DESCRIPTIONS, ["LabelName", "DisplayName"], described)
    rows = [box(IDS["train"][0], mid) for mid in ("/m/0264", "/m/0043", "/m/unheard")]
    write_csv(mirror / "base" / BOXES["train"], BOX_COLUMNS, rows)
    assert [category.name for category in source(mirror, "subset=mlperf").listing().categories] == [*CLASSES]
    (row,) = rows_of(mirror, "subset=mlperf,splits=train")["train"]
    assert labels(row) == [CLASSES.index("Cat"), UNKNOWN]


def test_the_state_follows_the_files(mirror):
    states = [source(mirror).listing().state, source(mirror).listing().state]
    with (mirror / "base" / BOXES["test"]).open("a") as file:
        file.write(",".join(map(str, box("ffffffffffffffff", "Cat"))) + "\n")
    states.append(source(mirror).listing().state)
    assert states[0] == states[1] != states[2]


def test_from_a_mirror_in_an_object_store_to_shards(mirror, bucket):
    for folder in ("base", "pixels"):
        for path in (mirror / folder).rglob("*.*"):
            target = bucket / path.relative_to(mirror)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["/m/01yrx", "Dog"])
    text = "openimages:base=s3://bucket/base,pixels=s3://bucket/pixels,rotation=apply,hierarchy=expand"
    raw = download(text, str(mirror / "data"), config)
    assert raw["categories"] == [
        {"id": 0, "name": "Cat", "original_id": "/m/01yrx"},
        {"id": 1, "name": "Dog", "original_id": "/m/0bt9lr"},
    ]
    assert {split: counts["images"] for split, counts in raw["splits"].items()} == {
        "train": 2, "val": 1, "test": 2,
    }  # fmt: skip
    assert raw["problems"][reasons.IMAGE_WITHOUT_BOXES]["count"] == 4
    uri = shard(raw, str(mirror / "data"), config)["uri"]
    # Evaluation reads the ids of the verified classes: Cat in the first image, Dog in both not.
    assert [image["verified"] for image in ShardDataset(uri, "test").annotations()["images"]] == [
        [0, 1],
        [0, 1],
    ]
    data = ShardDataset(uri, "train")
    samples = {sample["file_name"]: sample for _, sample in map(data.read, range(len(data)))}
    upright, turned = (samples[f"{image_id}.jpg"] for image_id in IDS["train"][:2])
    assert (upright["width"], upright["height"], turned["width"], turned["height"]) == (40, 30, 30, 40)
    (found,) = (item["bbox"] for item in upright["annotations"])
    assert found == pytest.approx([4, 6, 20, 21])
    (found,) = (item["bbox"] for item in turned["annotations"])
    assert found == pytest.approx([6, 16, 21, 20])  # 90 degrees counter-clockwise: y, and width - x - w
    assert upright["original_id"] == IDS["train"][0]


def test_from_a_mirror_on_the_web(mirror, monkeypatch, tmp_path):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (mirror / "pixels" / "train" / f"{IDS['train'][2]}.jpg").unlink()
    handler = partial(QuietHandler, directory=str(mirror))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        config = DataConfig(max_bad_fraction=0.5)
        raw = download(source(f"http://127.0.0.1:{httpd.server_port}").uri, str(tmp_path / "data"), config)
        httpd.shutdown()
    counts = {split: found["images"] for split, found in raw["splits"].items()}
    assert (
        counts == {"train": 3, "val": 2, "test": 2} and raw["problems"][reasons.IMAGE_MISSING]["count"] == 1
    )
    (found,) = Path(raw["images"]).rglob(f"{IDS['test'][1]}-*.jpg")
    assert found.read_bytes() == (mirror / "pixels" / "test" / f"{IDS['test'][1]}.jpg").read_bytes()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_images_and_empty_images(mirror):
    counts = {}
    for name, config in {
        "auto": DataConfig(classes=["Cat"]), "keep": DataConfig(classes=["Cat"], empty_images="keep"),
        "one": DataConfig(max_images=1),
    }.items():  # fmt: skip
        raw = download(source(mirror).uri, str(mirror / "data"), config)
        counts[name] = {split: found["images"] for split, found in raw["splits"].items()}
    assert counts == {
        "auto": {"train": 1, "val": 1, "test": 1}, "keep": {"train": 4, "val": 3, "test": 2},
        "one": {"train": 1, "val": 1, "test": 1},
    }  # fmt: skip


def test_more_images_and_other_parts_fetch_only_what_is_new(mirror):
    config = DataConfig(val_fraction=0.5)
    ids = mirror / "ids.txt"
    ids.write_text("\n".join(f"train/{image_id}" for image_id in IDS["train"][:2]))
    found = []
    for text in (f"images={ids}", "splits=train", "splits=train,hierarchy=expand"):
        raw = download(source(mirror, text).uri, str(mirror / "data"), config)
        found.append({path.name: path.stat().st_mtime_ns for path in Path(raw["images"]).rglob("*.jpg")})
    assert list(map(len, found)) == [2, 4, 4] and found[0].items() < found[1].items() == found[2].items()
    row = box("0000ffffffffffff", "Cat") + [0.5] * len(CLICKS)
    with (mirror / "base" / BOXES["train"]).open("a") as file:
        file.write(",".join(map(str, row)) + "\n")
    shutil.copy(mirror / "pixels/train" / f"{IDS['train'][0]}.jpg", mirror / "pixels/train" / f"{row[0]}.jpg")
    after = download(source(mirror, "splits=train").uri, str(mirror / "data"), config)
    assert after["splits"]["train"]["images"] + after["splits"]["val"]["images"] == 5
    new = {path.name: path.stat().st_mtime_ns for path in Path(after["images"]).rglob("*.jpg")}
    assert len(new) == 5 and found[2].items() < new.items()
