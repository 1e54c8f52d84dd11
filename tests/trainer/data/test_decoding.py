"""Images that are damaged inside: named, counted, the same on every rank, and no end unless they are many."""

import io
import re
from dataclasses import replace

import pytest
import torch
from batches import take
from PIL import Image
from source_rows import shards_of

from trainer.base.errors import DataError
from trainer.config.schema import DataConfig, LoaderConfig
from trainer.data.decoding import decode, read_sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL

DATA = DataConfig(val_fraction=0.0, processes=1, threads=1)
CONFIG = LoaderConfig(image_size=96, workers=2, prefetch=2)
SCAN, TABLE = "3.jpg", "5.jpg"


def half_lost(data):
    """What a picture is of whose second half something wrote over: its headers and its end are sound."""
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    return data[:middle] + bytes(len(data) - 2 - middle) + data[-2:]


def without_a_table(data):
    """Its first Huffman table says that there are more codes of one bit than there can be."""
    broken = bytearray(data)
    broken[data.index(b"\xff\xc4") + 5] = 200
    return bytes(broken)


@pytest.fixture
def source(make_coco):
    names = [f"{number}.jpg" for number in range(12)]
    root = make_coco(train=names)
    for name, harm in ((SCAN, half_lost), (TABLE, without_a_table)):
        path = root / "train" / name
        path.write_bytes(harm(path.read_bytes()))
    return root


@pytest.fixture
def dataset(source, tmp_path):
    return ShardDataset(shards_of(source, tmp_path / "data", DATA).uri, "train")


def named(dataset):
    """Indices of the samples by name."""
    return {dataset.read(index)[1]["file_name"]: index for index in range(len(dataset))}


def an_epoch(dataset, *, max_bad_fraction=0.2, world=1, workers=2):
    """Pixels and boxes of all samples by image id, read by so many ranks."""
    images = {}
    for rank in range(world):
        config = replace(CONFIG, workers=workers)
        for batch in take(dataset, config, 3, rank=rank, size=world, max_bad_fraction=max_bad_fraction):
            for row, image_id in enumerate(batch.image_ids):
                images[image_id] = (batch.images[row], (batch.labels[row] >= 0).sum().item())
    return images


def test_training_goes_on_and_names_them_once(dataset, caplog):
    names = named(dataset)
    images = an_epoch(dataset)
    an_epoch(dataset)
    assert len(images) == 12
    pixels, boxes = images[dataset.image_ids[names[TABLE]]]
    assert (pixels == FILL).all() and boxes == 0
    pixels, boxes = images[dataset.image_ids[names[SCAN]]]
    assert (pixels != FILL).any() and boxes == 2
    messages = sorted(
        record.getMessage() for record in caplog.records if "damaged image" in record.getMessage()
    )
    assert len(messages) == 4, "once by each loader"
    assert re.search(rf"{SCAN} in train-00000\.tar: .+; its decodable part is used", messages[0])
    assert re.search(rf"{TABLE} in train-00000\.tar: .*; a gray image is used instead", messages[2])


def test_they_are_the_same_at_any_number_of_ranks_and_workers(dataset):
    alone, shared = an_epoch(dataset), an_epoch(dataset, world=2, workers=1)
    assert alone.keys() == shared.keys()
    for image_id, (pixels, boxes) in alone.items():
        assert torch.equal(pixels, shared[image_id][0]) and boxes == shared[image_id][1]


def test_too_many_end_the_run_with_their_names(dataset):
    with pytest.raises(DataError, match=r"2 of 12 images of train .*max_bad_fraction 0\.1 allows") as caught:
        an_epoch(dataset, max_bad_fraction=0.1)
    assert SCAN in caught.value.message and TABLE in caught.value.message
    assert "data.decode_check=true" in caught.value.fix


def test_one_sample_that_is_asked_for_is_an_error_that_names_it(dataset):
    with pytest.raises(DataError, match=rf"image {SCAN} in the shards at .* cannot be decoded"):
        read_sample(dataset, named(dataset)[SCAN])


def test_an_image_is_decoded_at_half_its_size_where_that_is_enough():
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((203, 101)).convert("RGB").save(buffer, "JPEG", quality=95)
    whole = decode(buffer.getvalue(), 203, 101)
    for divisor in (2, 4, 8):
        small = decode(buffer.getvalue(), 203, 101, divisor)
        assert small.shape == (3, -(-101 // divisor), -(-203 // divisor))
        means = torch.nn.functional.avg_pool2d(whole.float(), divisor)
        assert (small[:, : means.shape[1], : means.shape[2]] - means).abs().max() < 4
    with pytest.raises(ValueError, match="203x101"):
        decode(buffer.getvalue(), 203, 100)
