"""Faults of stores and servers in download and sharding."""

from dataclasses import replace
from pathlib import Path

import pytest
from fault_table import cells, contents, each
from faulty_store import go_away, upload_folder
from prepared_data import BOTH, CONFIG, SOME_BAD, Prepared, images_of

from tests.trainer.data.test_foreign_addresses import SECRET, servers, stored, write_set
from trainer.base.errors import DataError, StorageError
from trainer.data import problem_counts as reasons
from trainer.data.download import download
from trainer.data.shards import shard

__all__ = ["servers"]

WRITTEN = [
    *("plan.json", "train.parquet", "manifest.json", "sums-", ".tar", "train-00000.json", "samples.npy"),
    *("annotations", "index.json"),
]
IMAGE = {"query": ".jpg"}
STORE = {
    "swallow": [("swallow", {"method": "PUT", "query": name}) for name in WRITTEN],
    "alter": [("alter", {"method": "PUT", "query": name}) for name in WRITTEN],
    "busy": [("status", {"times": 6}), ("status", {"times": 4, "method": "PUT"})],
    "reset": [("drop", {"times": 6}), ("lost", {"times": 4, "method": "PUT"})],
    "short": [("cut", {"times": 6, "after": 100, **IMAGE}), ("short", {"times": 3, "after": 50, **IMAGE}),
              ("corrupt", {"times": 2, "after": 300, **IMAGE}), ("spoil", {"times": 2, "method": "PUT"})],
    "stall": [("stall", {"times": 3, "after": 1, **IMAGE})],
}  # fmt: skip


@pytest.fixture
def in_store(fifteen_images, bucket, tmp_path):
    """A source in a store, and what its shards are where nothing fails."""
    upload_folder(fifteen_images, "s3://bucket/source")
    calm = Prepared(f"coco:{fifteen_images}", str(tmp_path / "calm"))
    return [data for name, data in contents(Path(calm.index.uri)).items() if name.endswith((".tar", ".npy"))]


def kept(bucket: Path) -> list[bytes]:
    files = contents(*(bucket / "data" / "shards").iterdir())
    return [data for name, data in files.items() if name.endswith((".tar", ".npy"))]


@pytest.mark.parametrize("kind", each(*STORE, stages=BOTH))
def test_a_store_that_fails(kind, in_store, proxy, bucket, injected):
    for fault, details in STORE[kind]:
        proxy.fail(fault, **details)
    if kind in ("swallow", "alter"):
        Prepared("coco:s3://bucket/source", "s3://bucket/data")
        assert proxy.faults == []
    else:
        raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
        assert proxy.faults == [] and raw.problems == {}
        for fault, details in STORE[kind]:
            proxy.fail(fault, **details)
        shard(raw, "s3://bucket/data", CONFIG)
        assert proxy.faults == []
    assert kept(bucket) == in_store
    injected(sum(details.get("times", 1) for _, details in STORE[kind]))


@cells("away", *BOTH)
@pytest.mark.parametrize("after", [3, 12])
def test_a_store_that_comes_back(after, in_store, proxy, bucket, hurried):
    hurried(first=10.0)
    death = go_away(proxy, after, 0.3)
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    death.join()
    death = go_away(proxy, after, 0.3)
    shard(raw, "s3://bucket/data", CONFIG)
    death.join()
    assert kept(bucket) == in_store and raw.problems == {}


@cells("dead", "shard")
def test_a_store_that_stays_away(in_store, proxy, hurried, bucket):
    raw = download("coco:s3://bucket/source", "s3://bucket/data", CONFIG)
    hurried(total=0.5)
    proxy.fail("status", times=10**6, query="/images/", status=503)
    with pytest.raises(StorageError) as caught:
        shard(raw, "s3://bucket/data", CONFIG)
    assert "damaged" not in caught.value.message
    assert not list((bucket / "data" / "shards").rglob("index.json"))
    proxy.faults.clear()
    hurried()
    shard(raw, "s3://bucket/data", CONFIG)
    assert kept(bucket) == in_store


@cells("missing", "download")
def test_images_missing_on_the_server(servers, tmp_path, injected):
    server, _ = servers("127.0.0.1", {f"/{number}.jpg": None for number in range(10)})
    source = write_set(tmp_path / "x.json", [f"{server}/{number}.jpg" for number in range(20)])
    config = replace(SOME_BAD, allow_hosts=["127.0.0.1"])
    manifest = download(source, str(tmp_path / "data"), config)
    assert images_of(manifest) == 10 and manifest.problems[reasons.IMAGE_MISSING].count == 10
    with pytest.raises(DataError, match="no such file"):
        download(source, str(tmp_path / "strict"), replace(config, max_bad_fraction=0.1))
    injected(10)


@cells("back", *BOTH)
def test_a_missing_image_that_returns(fifteen_images, tmp_path, injected):
    images = sorted((fifteen_images / "train").iterdir())[:3]
    for image in images:
        image.rename(f"{image}.away")
    first = Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"), SOME_BAD)
    for image in images:
        Path(f"{image}.away").rename(image)
    second = Prepared(f"coco:{fifteen_images}", str(tmp_path / "data"), SOME_BAD)
    assert (images_of(first.raw), images_of(second.raw)) == (12, 15)
    assert sum(split.samples for split in second.index.splits.values()) == 15
    injected(3)


@cells("redirect", "download")
def test_redirects(servers, tmp_path, injected):
    inside, asked = servers("127.0.0.2", {"/latest/meta-data": SECRET})
    answers = {
        "/a.jpg": f"{inside}/latest/meta-data",
        "/b.jpg": "/c.jpg",
        "/c.jpg": f"{inside}/latest/meta-data",
    }
    outside, _ = servers("127.0.0.1", answers | {"/g.jpg": "file:///etc/hostname"})
    source = write_set(tmp_path / "x.json", [f"{outside}/{name}.jpg" for name in "abgk"])
    manifest = download(source, str(tmp_path / "data"), replace(SOME_BAD, allow_hosts=["127.0.0.1"]))
    assert asked == [] and b"hidden" not in stored(tmp_path / "data")
    assert manifest.problems[reasons.IMAGE_REFUSED].count == 3 and images_of(manifest) == 1
    injected(3)


@cells("internal", "download")
def test_internal_addresses(servers, tmp_path, injected):
    server, asked = servers("127.0.0.1", {})
    port = server.rpartition(":")[2]
    hosts = ("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "2130706433")
    for host in hosts:
        source = write_set(tmp_path / "x.json", [f"http://{host}:{port}/{n}.jpg" for n in range(3)])
        with pytest.raises(DataError, match=r"nobody allowed|is at|is no address"):
            download(source, str(tmp_path / "data"), CONFIG)
    assert asked == []
    injected(len(hosts))


@cells("other", "download")
def test_bytes_that_are_no_image(servers, make_jpeg, tmp_path, injected):
    answers = {
        "/1.jpg": SECRET,
        "/2.jpg": b"\xff\xd8\xff" + SECRET,
        "/3.jpg": make_jpeg()[:200],
        "/4.jpg": b"<html>",
    }
    server, _ = servers("127.0.0.1", answers)
    source = write_set(tmp_path / "x.json", [f"{server}/{n}.jpg" for n in range(1, 8)])
    manifest = download(source, str(tmp_path / "data"), replace(SOME_BAD, allow_hosts=["127.0.0.1"]))
    assert b"hidden" not in stored(tmp_path / "data") and images_of(manifest) == 3
    injected(4)
