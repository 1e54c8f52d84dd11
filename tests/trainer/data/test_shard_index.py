"""Samples are found by the index, and read from copies that are bounded, shared and checked on arrival."""

import hashlib
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from patience import until
from source_rows import shards_of

from trainer.base.errors import DamagedError, DataError, StorageError
from trainer.config.schema import DataConfig
from trainer.data import shard_index
from trainer.data.shard_index import ShardCache, ShardDataset
from trainer.storage.cache import FOLDER_VARIABLE, CacheBusy

CONFIG = DataConfig(processes=1, shard_bytes=4000, val_fraction=0.0)
NAMES = [f"{number}.jpg" for number in range(20)]


@pytest.fixture
def source(make_coco) -> Path:
    return make_coco(train=NAMES, val=["v.jpg"])


@pytest.fixture
def uri(source, tmp_path) -> str:
    return shards_of(source, tmp_path / "data", CONFIG).uri


def test_it_reads_every_sample(uri, source):
    dataset = ShardDataset(uri, "train")
    assert len(dataset) == 20 and len(ShardDataset(uri, "val")) == 1
    assert [category["name"] for category in dataset.categories] == ["cat", "dog"]
    assert sorted(dataset.image_ids) == list(range(1, 21))
    assert dataset.sizes.tolist() == [[40, 30]] * 20
    assert sum(dataset.shard_sizes) == 20 and len(dataset.shard_sizes) > 2
    for index in range(20):
        data, sample = dataset.read(index)
        assert data == (source / "train" / sample["file_name"]).read_bytes()
        assert sample["image_id"] == dataset.image_ids[index]
        assert len(sample["annotations"]) == 2


def test_threads_read_the_same_with_few_open_files(uri, monkeypatch):
    monkeypatch.setattr(shard_index, "_OPEN_FILES", 1)
    dataset = ShardDataset(uri, "train")
    alone = [dataset.read(index) for index in range(20)]
    order = list(np.random.default_rng(0).integers(0, 20, 2000))
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(dataset.read, order))
    assert all(sample == alone[index] for sample, index in zip(together, order, strict=True))
    assert len(dataset._files._files) == 1


def test_an_unknown_split_or_folder_is_named(uri, tmp_path):
    with pytest.raises(DataError, match="no split 'test'") as caught:
        ShardDataset(uri, "test")
    assert "train, val" in caught.value.fix
    with pytest.raises(StorageError, match=r"no such file: .*index\.json"):
        ShardDataset(str(tmp_path), "train")


def first_shard(uri: str) -> Path:
    return Path(uri) / "train-00000.tar"


def flip_a_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_every_byte_of_a_sample_counts(uri):
    dataset = ShardDataset(uri, "train")
    row = dataset.samples[2]
    offset, end = row["offset"], row["json_offset"] + row["json_length"]
    for at in (offset, offset + row["length"] // 2, end - 2):
        flip_a_byte(first_shard(uri), int(at))
        with pytest.raises(DataError, match=r"train-00000\.tar is damaged") as caught:
            dataset.read(2)
        assert "kubedet data verify --repair" in caught.value.fix and "delete" not in caught.value.fix
        flip_a_byte(first_shard(uri), int(at))
    dataset.read(2)


@pytest.mark.parametrize("damage", ["pickle", "shorter"])
def test_a_damaged_table_is_an_error(uri, damage):
    path = Path(uri) / "train.samples.npy"
    if damage == "pickle":
        np.save(path, np.array([{"shard": 0}], dtype=object), allow_pickle=True)
    else:
        np.save(path, np.load(path)[:5])
    with pytest.raises(DamagedError, match=r"train\.samples\.npy is damaged"):
        ShardDataset(uri, "train")


@pytest.fixture
def remote(source, bucket) -> str:
    """Shards in an object store."""
    return shards_of(source, "s3://bucket/data", CONFIG).uri


def stored(remote, bucket, name) -> Path:
    return bucket / remote.removeprefix("s3://bucket/") / name


def copies(folder) -> list[Path]:
    return sorted(Path(folder).glob("*.tar"))


def test_expected_shards_are_read_from_their_copies(remote, bucket, tmp_path):
    dataset = ShardDataset(remote, "train", ShardCache(tmp_path / "cache"))
    whole = [dataset.read(position) for position in range(20)]
    assert {sample["file_name"] for _, sample in whole} == set(NAMES) and not copies(tmp_path / "cache")
    dataset.prefetch(np.arange(20))
    until(lambda: len(dataset._files._files) == len(dataset.shards))
    for shard_of in dataset.shards:
        stored(remote, bucket, shard_of.name).unlink()
    assert [dataset.read(position) for position in range(20)] == whole


def test_a_damaged_copy_is_replaced_by_what_the_store_has(remote, tmp_path):
    dataset = ShardDataset(remote, "train", ShardCache(tmp_path / "cache"))
    whole = dataset.read(0)
    dataset.prefetch(np.array([0]))
    until(lambda: dataset._files._files)
    (copy,) = copies(tmp_path / "cache")
    flip_a_byte(copy, int(dataset.samples[0]["offset"]) + 50)
    assert dataset.read(0) == whole
    assert not copy.exists()


def test_a_shard_that_is_damaged_in_the_store_is_named(remote, bucket, tmp_path):
    dataset = ShardDataset(remote, "train", ShardCache(tmp_path / "cache"))
    flip_a_byte(stored(remote, bucket, "train-00000.tar"), int(dataset.samples[0]["offset"]) + 50)
    with pytest.raises(DataError, match=r"train-00000\.tar is damaged"):
        dataset.read(0)
    dataset.prefetch(np.array([0]))
    until(lambda: dataset._files._failed)
    with pytest.raises(StorageError, match=r"train-00000\.tar is damaged: its sha256"):
        dataset.read(1)


def test_without_room_nothing_waits(remote, tmp_path):
    dataset = ShardDataset(remote, "train", ShardCache(tmp_path / "cache", 6000))
    dataset.prefetch(np.arange(20))
    assert len({dataset.read(position)[1]["image_id"] for position in range(20)}) == 20
    until(lambda: not dataset._files._in_flight)
    assert sum(path.stat().st_size for path in copies(tmp_path / "cache")) <= 6000


SIZE = 1000


@pytest.fixture
def store(tmp_path):
    """Two shards in a folder that plays the store: URI, sha256 and bytes of each."""
    (tmp_path / "store").mkdir()
    entries = []
    for number in (0, 1):
        path, content = tmp_path / "store" / f"{number}.tar", bytes([number]) * SIZE
        path.write_bytes(content)
        entries.append((str(path), hashlib.sha256(content).hexdigest(), SIZE))
    return entries


def names(folder):
    return {path.stem for path in Path(folder).glob("*.tar")}


def test_what_arrives_damaged_once_is_fetched_again(store, tmp_path, monkeypatch):
    answers = [b"x" * SIZE, bytes(SIZE)]
    monkeypatch.setattr(shard_index.storage, "read_range", lambda *_: answers.pop(0))
    assert ShardCache(tmp_path, SIZE).fetch(*store[0])


def test_what_arrives_damaged_always_is_named_and_not_kept(store, tmp_path):
    Path(store[0][0]).write_bytes(b"x" * SIZE)
    with pytest.raises(StorageError, match=r"0\.tar is damaged: its sha256 is"):
        ShardCache(tmp_path / "cache", SIZE).fetch(*store[0])
    assert not names(tmp_path / "cache") and not list((tmp_path / "cache").glob("*.part"))


def test_what_a_killed_process_left_is_removed_and_its_room_free(store, tmp_path):
    script = (
        "import sys, time; from trainer.data import shard_index as s; from pathlib import Path\n"
        "def read(*_):\n    print('reading', flush=True); time.sleep(60)\n"
        "s.storage.read_range = read\n"
        "s.ShardCache(Path(sys.argv[1]), 1000).fetch(sys.argv[2], sys.argv[3], 1000)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *store[0][:2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(CacheBusy):
            ShardCache(tmp_path, SIZE).fetch(*store[0])
        assert not ShardCache(tmp_path, SIZE).fetch(*store[1])
        process.kill()
    assert list(tmp_path.glob("*.part"))
    assert ShardCache(tmp_path, SIZE).fetch(*store[1])
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_ends_nothing_and_is_told(store, tmp_path, caplog):
    cache = ShardCache(tmp_path / "cache", 10 * SIZE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))  # The system refuses what is longer.
    try:
        assert [cache.fetch(*one) for one in store] == [False] * 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not names(tmp_path / "cache") and not list((tmp_path / "cache").glob("*.part"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert ": File too large; images are read" in message and FOLDER_VARIABLE in message
    assert cache.fetch(*store[0])
