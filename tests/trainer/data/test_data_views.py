"""The same data in an object store."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.data.inspection import inspect
from trainer.data.preview import draw_contact_sheet
from trainer.data.shard_folder import read_index
from trainer.data.verification import verify


def test_a_store_tells_the_same(shards, data_root, bucket):
    shutil.copytree(data_root, bucket, dirs_exist_ok=True)
    places = [
        (uri, f"s3://bucket/{Path(uri).relative_to(data_root)}")
        for uri in (shards, f"{data_root}/raw/{read_index(shards).raw_fingerprint}")
    ]
    for uri, remote in places:
        verified, expected = verify(remote), verify(uri)
        assert verified == replace(expected, uri=remote) and verified.problems == []
    uri, remote = places[0]
    assert inspect(remote) == replace(inspect(uri), uri=remote)
    assert draw_contact_sheet(remote, 3)[0].tobytes() == draw_contact_sheet(uri, 3)[0].tobytes()
    with pytest.raises(DataError, match="contains raw images"):
        inspect(places[1][1])


def test_what_is_missing_in_a_store_is_told(shards, bucket):
    shutil.copytree(shards, bucket / "shards")
    (bucket / "shards" / "train-00000.tar").unlink()
    assert verify("s3://bucket/shards").problems == ["no such file: s3://bucket/shards/train-00000.tar"]
    assert inspect("s3://bucket/shards").problems == {"file missing": 1}
    for uri in ("s3://bucket/nowhere", "s3://bucket/shards/train"):
        with pytest.raises(DataError, match=f"{uri} does not exist"):
            inspect(uri)
