"""Open Images from a mirror to shards."""

import shutil
from functools import partialmethod
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from openimages_mirror import CLICKS, IDS, MIDS, box, source
from source_rows import shards_of
from web_server import WebServer

from trainer.config.schema import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.raw_manifest import Category
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.sources.openimages import BOXES
from trainer.evaluation.openimages_metric import read_image_labels


def test_evaluation_learns_the_hierarchy_of_the_classes_kept(mirror, tmp_path):
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["Dog", "Cat", "Animal", "Tree, large"])
    index = shards_of(source(mirror).uri, tmp_path / "data", config)
    assert index.hierarchy == {"0": [2], "1": [2]}
    for split in ("train", "test"):
        truth = ShardDataset(index.uri, split).annotations()
        assert truth["hierarchy"] == {"0": [2], "1": [2]}
        mids = [MIDS[name] for name in config.classes]
        assert [one["original_id"] for one in truth["categories"]] == mids
    # An object is one box; what is verified holds above and below: Cat is there, Dog not, Animal not.
    assert [len(truth["annotations"]), *(image["verified"] for image in truth["images"])] == [
        2,
        [0, 1, 2],
        [0, 1, 2],
    ]
    labels_of, above = read_image_labels(truth)
    assert labels_of is not None and above == {0: [2], 1: [2]}
    assert read_image_labels(ShardDataset(index.uri, "train").annotations())[0] is None


def test_from_a_mirror_in_an_object_store_to_shards(mirror, bucket):
    for folder in ("base", "pixels"):
        for path in (mirror / folder).rglob("*.*"):
            target = bucket / path.relative_to(mirror)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    config = DataConfig(processes=1, max_bad_fraction=0.5, classes=["/m/01yrx", "Dog"])
    text = "openimages:base=s3://bucket/base,pixels=s3://bucket/pixels"
    raw = download(text, str(mirror / "data"), config)
    assert raw.categories == [Category(0, "Cat", "/m/01yrx"), Category(1, "Dog", "/m/0bt9lr")]
    counts = {split: part.images for split, part in raw.splits.items()}
    assert counts == {"train": 2, "val": 1, "test": 2}
    assert raw.problems[reasons.IMAGE_WITHOUT_BOXES].count == 4
    uri = shard(raw, str(mirror / "data"), config).uri
    # Evaluation reads the ids of the verified classes: Cat in the first image, Dog in neither.
    images = ShardDataset(uri, "test").annotations()["images"]
    assert [image["verified"] for image in images] == [[0, 1], [1]]
    data = ShardDataset(uri, "train")
    samples = {sample["file_name"]: sample for _, sample in map(data.read, range(len(data)))}
    first = samples[f"{IDS['train'][0]}.jpg"]
    assert (first["width"], first["height"], first["original_id"]) == (40, 30, IDS["train"][0])
    (bbox,) = (item["bbox"] for item in first["annotations"])
    assert bbox == pytest.approx([4, 6, 20, 21])


def test_from_a_mirror_on_the_web(mirror, monkeypatch, tmp_path):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (mirror / "pixels" / "train" / f"{IDS['train'][2]}.jpg").unlink()

    class Files(SimpleHTTPRequestHandler):
        __init__ = partialmethod(SimpleHTTPRequestHandler.__init__, directory=str(mirror))

    with WebServer(Files) as server:
        raw = download(source(server.url).uri, str(tmp_path / "data"), DataConfig(max_bad_fraction=0.5))
    counts = {split: part.images for split, part in raw.splits.items()}
    assert counts == {"train": 3, "val": 2, "test": 2} and raw.problems[reasons.IMAGE_MISSING].count == 1
    (part,) = Path(raw.images).rglob(f"{IDS['test'][1]}-*.jpg")
    assert part.read_bytes() == (mirror / "pixels" / "test" / f"{IDS['test'][1]}.jpg").read_bytes()


def test_more_images_and_other_parts_fetch_only_what_is_new(mirror):
    ids, fetched = mirror / "ids.txt", []
    ids.write_text("\n".join(f"train/{image_id}" for image_id in IDS["train"][:2]))
    for text in (f"images={ids}", "splits=train", "splits=train,hierarchy=none", "splits=train"):
        if len(fetched) == 3:
            row = box("0000ffffffffffff", "Cat") + [0.5] * len(CLICKS)
            with (mirror / "base" / BOXES["train"]).open("a") as file:
                file.write(",".join(map(str, row)) + "\n")
            images = mirror / "pixels" / "train"
            shutil.copy(images / f"{IDS['train'][0]}.jpg", images / f"{row[0]}.jpg")
        raw = download(source(mirror, text).uri, str(mirror / "data"), DataConfig(val_fraction=0.5))
        fetched.append({path.name: path.stat().st_mtime_ns for path in Path(raw.images).rglob("*.jpg")})
    assert [len(images) for images in fetched] == [2, 4, 4, 5]
    assert fetched[0].items() < fetched[1].items() == fetched[2].items() < fetched[3].items()
