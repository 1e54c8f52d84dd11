"""Open Images from a mirror to shards."""

import csv
import http.server
import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from openimages_mirror import CLICKS, IDS, MIDS, box, source, write_csv

from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.raw_folder import Category
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.sources.openimages import BOXES, DESCRIPTIONS
from trainer.evaluation.openimages_metric import image_labels

SHARED = Path(__file__).parents[5] / "shared" / "data" / "openimages_csv"


def test_evaluation_learns_the_hierarchy_of_the_classes_kept(mirror, tmp_path):
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["Dog", "Cat", "Animal", "Tree, large"])
    raw = download(source(mirror).uri, str(tmp_path / "data"), config)
    index = shard(raw, str(tmp_path / "data"), config)
    assert raw.hierarchy == index.hierarchy == {"0": [2], "1": [2]}
    for split in ("train", "test"):
        truth = ShardDataset(index.uri, split).annotations()
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
    assert image_labels(ShardDataset(index.uri, "train").annotations())[0] is None


def test_from_a_mirror_in_an_object_store_to_shards(mirror, bucket):
    for folder in ("base", "pixels"):
        for path in (mirror / folder).rglob("*.*"):
            target = bucket / path.relative_to(mirror)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["/m/01yrx", "Dog"])
    text = "openimages:base=s3://bucket/base,pixels=s3://bucket/pixels,rotation=apply,hierarchy=expand"
    raw = download(text, str(mirror / "data"), config)
    assert raw.categories == [
        Category(0, "Cat", "/m/01yrx"),
        Category(1, "Dog", "/m/0bt9lr"),
    ]
    assert {split: counts.images for split, counts in raw.splits.items()} == {
        "train": 2, "val": 1, "test": 2,
    }  # fmt: skip
    assert raw.problems[reasons.IMAGE_WITHOUT_BOXES].count == 4
    uri = shard(raw, str(mirror / "data"), config).uri
    # Evaluation reads the ids of the verified classes: Cat in the first image, Dog in both not.
    assert [image["verified"] for image in ShardDataset(uri, "test").annotations()["images"]] == [
        [0, 1],
        [0, 1],
    ]
    data = ShardDataset(uri, "train")
    samples = {sample["file_name"]: sample for _, sample in map(data.read, range(len(data)))}
    upright, turned = (samples[f"{image_id}.jpg"] for image_id in IDS["train"][:2])
    assert (upright["width"], upright["height"], turned["width"], turned["height"]) == (40, 30, 30, 40)
    (bbox,) = (item["bbox"] for item in upright["annotations"])
    assert bbox == pytest.approx([4, 6, 20, 21])
    (bbox,) = (item["bbox"] for item in turned["annotations"])
    assert bbox == pytest.approx([6, 16, 21, 20])  # 90 degrees counter-clockwise: y, and width - x - w
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
    counts = {split: part.images for split, part in raw.splits.items()}
    assert counts == {"train": 3, "val": 2, "test": 2} and raw.problems[reasons.IMAGE_MISSING].count == 1
    (part,) = Path(raw.images).rglob(f"{IDS['test'][1]}-*.jpg")
    assert part.read_bytes() == (mirror / "pixels" / "test" / f"{IDS['test'][1]}.jpg").read_bytes()


def test_images_and_empty_images(mirror):
    counts = {}
    for name, config in {
        "auto": DataConfig(classes=["Cat"]), "keep": DataConfig(classes=["Cat"], empty_images="keep"),
        "one": DataConfig(max_images=1),
    }.items():  # fmt: skip
        raw = download(source(mirror).uri, str(mirror / "data"), config)
        counts[name] = {split: part.images for split, part in raw.splits.items()}
    assert counts == {
        "auto": {"train": 1, "val": 1, "test": 1}, "keep": {"train": 4, "val": 3, "test": 2},
        "one": {"train": 1, "val": 1, "test": 1},
    }  # fmt: skip


def test_more_images_and_other_parts_fetch_only_what_is_new(mirror):
    config = DataConfig(val_fraction=0.5)
    ids = mirror / "ids.txt"
    ids.write_text("\n".join(f"train/{image_id}" for image_id in IDS["train"][:2]))
    fetched = []
    for text in (f"images={ids}", "splits=train", "splits=train,hierarchy=expand"):
        raw = download(source(mirror, text).uri, str(mirror / "data"), config)
        fetched.append({path.name: path.stat().st_mtime_ns for path in Path(raw.images).rglob("*.jpg")})
    assert (
        list(map(len, fetched)) == [2, 4, 4] and fetched[0].items() < fetched[1].items() == fetched[2].items()
    )
    row = box("0000ffffffffffff", "Cat") + [0.5] * len(CLICKS)
    with (mirror / "base" / BOXES["train"]).open("a") as file:
        file.write(",".join(map(str, row)) + "\n")
    shutil.copy(mirror / "pixels/train" / f"{IDS['train'][0]}.jpg", mirror / "pixels/train" / f"{row[0]}.jpg")
    after = download(source(mirror, "splits=train").uri, str(mirror / "data"), config)
    assert after.splits["train"].images + after.splits["val"].images == 5
    new = {path.name: path.stat().st_mtime_ns for path in Path(after.images).rglob("*.jpg")}
    assert len(new) == 5 and fetched[2].items() < new.items()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the genuine rows")
def test_genuine_rows_with_images_in_an_object_store(bucket, make_jpeg, tmp_path):
    rows = list(csv.DictReader((SHARED / "test-annotations-bbox.csv").open(newline="")))
    mids = sorted({row["LabelName"] for row in rows})
    write_csv(bucket / "base" / DESCRIPTIONS, ["LabelName", "DisplayName"], [[mid, mid[3:]] for mid in mids])
    (bucket / "base" / BOXES["test"]).parent.mkdir(parents=True)
    shutil.copy(SHARED / "test-annotations-bbox.csv", bucket / "base" / BOXES["test"])
    (bucket / "pixels" / "test").mkdir(parents=True)
    for image_id in {row["ImageID"] for row in rows}:
        (bucket / "pixels" / "test" / f"{image_id}.jpg").write_bytes(make_jpeg(seed=int(image_id, 16)))
    config = DataConfig(processes=1, max_images=40, max_bad_fraction=0.02)
    text = "openimages:splits=test,labels=none,hierarchy=none,base=s3://bucket/base,pixels=s3://bucket/pixels"
    index = shard(download(text, str(tmp_path), config), str(tmp_path), config)
    expected = Counter((row["ImageID"], row["LabelName"][3:], row["IsGroupOf"]) for row in rows)
    seen: Counter[tuple[str, str, str]] = Counter()
    images = set()
    for split in index.splits:
        data = ShardDataset(index.uri, split)
        for number in range(len(data)):
            jpeg, sample = data.read(number)
            images.add(sample["original_id"])
            assert jpeg == make_jpeg(seed=int(sample["original_id"], 16))
            names = [data.categories[item["category_id"]]["name"] for item in sample["annotations"]]
            crowds = [str(item["iscrowd"]) for item in sample["annotations"]]
            seen.update(zip([sample["original_id"]] * len(names), names, crowds, strict=True))
    assert len(images) == 80 and seen == {key: n for key, n in expected.items() if key[0] in images}


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
