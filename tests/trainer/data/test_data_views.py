"""The same data at another place: moved, or in an object store."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.errors import DataError
from trainer.data.inspection import inspect
from trainer.data.preview import contact_sheet
from trainer.data.shard_folder import read_index
from trainer.data.verification import verify


@pytest.fixture
def folders(shards, data_root):
    """URIs of raw images and of the shards made of them."""
    return f"{data_root}/raw/{read_index(shards).raw_fingerprint}", shards


def test_a_store_tells_the_same(folders, data_root, bucket):
    shutil.copytree(data_root, bucket, dirs_exist_ok=True)
    for uri in folders:
        remote = f"s3://bucket/{Path(uri).relative_to(data_root)}"
        assert inspect(remote) == replace(inspect(uri), uri=remote)
        remote_result, local_result = verify(remote), verify(uri)
        assert remote_result.problems == [] and (remote_result.files, remote_result.bytes) == (
            local_result.files,
            local_result.bytes,
        )
        sheets = [contact_sheet(place, 3)[0].tobytes() for place in (remote, uri)]
        assert sheets[0] == sheets[1]


def test_what_is_missing_in_a_store_is_told(shards, bucket):
    shutil.copytree(shards, bucket / "shards")
    (bucket / "shards" / "train-00000.tar").unlink()
    assert verify("s3://bucket/shards").problems == ["no such file: s3://bucket/shards/train-00000.tar"]
    assert inspect("s3://bucket/shards").problems == {"file missing": 1}
    for uri in ("s3://bucket/nowhere", "s3://bucket/shards/train"):
        with pytest.raises(DataError, match=f"{uri} does not exist"):
            inspect(uri)
