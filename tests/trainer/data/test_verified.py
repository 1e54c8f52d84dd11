"""Which classes an image's absence of boxes tells of, from Open Images' files to batches and a training."""

import numpy as np
import pytest
import torch
from batches import take
from openimages_mirror import MIDS
from source_rows import shards_of

from trainer.base.errors import DataError
from trainer.config.schema import LoaderConfig
from trainer.data.sample_order import check_verified
from trainer.data.shard_index import ShardDataset
from trainer.model import recipes
from trainer.training.loop import train

NAMES = list(MIDS)


@pytest.fixture
def open_images(mirror, tmp_path):
    """Shards of the small Open Images, with the verified classes of train."""
    config = recipes.load("debug", {"data.processes": 1, "data.max_bad_fraction": 0.2}).data
    source = f"openimages:base={mirror}/base/,pixels={mirror}/pixels,labels=all"
    return shards_of(source, tmp_path / "root", config).uri


def batches(uri, count, **changes):
    config = LoaderConfig(image_size=96, workers=1, **changes)
    return take(ShardDataset(uri, "train"), config, count, global_batch=2, batch_size=2, verified=True)


def test_batches_tell_the_verified_classes(open_images):
    """Cat with a box and no Dog, a group of Man; Dog against the verdict; Tree; Animal with a box."""
    expected = {1: ["Cat", "Dog"], 2: ["Dog"], 3: ["Dog", "Tree, large"], 4: ["Animal", "Dog"]}
    ids = sorted(ShardDataset(open_images, "train").image_ids.tolist())
    verified_classes = {}
    for batch in batches(open_images, 2):
        assert batch.verified.shape == (2, 6) and batch.verified.dtype == torch.bool
        for image_id, row in zip(batch.image_ids, batch.verified, strict=True):
            verified_classes[ids.index(image_id) + 1] = sorted(NAMES[label] for label in np.flatnonzero(row))
    assert verified_classes == expected


def test_of_a_mosaic_only_what_is_known_of_all_four(open_images):
    for batch in batches(open_images, 4, mosaic=1.0):
        assert not batch.verified[:, [NAMES.index(name) for name in ("Person", "Man")]].any()
        assert batch.verified.sum() <= 4


def test_data_that_cannot_is_refused(shards, tiny, tmp_path):
    with pytest.raises(DataError, match=r"of 24 images in .* no image lists the classes") as caught:
        train(tiny(train__negatives="verified"), shards, str(tmp_path))
    assert "labels=all" in caught.value.fix and "train.negatives=all" in caught.value.fix
    with pytest.raises(DataError, match="no image lists"):
        check_verified(ShardDataset(shards, "train"))
