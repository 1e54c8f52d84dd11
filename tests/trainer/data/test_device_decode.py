"""Drawing on the device: the views of the host's path, and clear words where it cannot be done."""

import dataclasses
import sys
import types

import numpy as np
import pytest
import simplejpeg
import torch
from batches import take

from trainer.base.errors import ConfigError, DataError
from trainer.config.schema import LoaderConfig
from trainer.data import device_decode
from trainer.data.decoding import decode
from trainer.data.device_decode import check, draw_view
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import random_view, render, sample_draws

CONFIG = LoaderConfig(image_size=96, workers=2, scale=[0.5, 1.6], flip=0.5, flip_vertical=0.5, brightness=0.2)
STRONG = dataclasses.replace(CONFIG, mosaic=0.5, mixup=0.5, sizes=[96, 128, 160])
GPU = dataclasses.replace(CONFIG, decoder="gpu")


def on_the_host(jpeg, device):
    """Replaces nvJPEG: decodes on the CPU, and fails as it does."""
    try:
        return torch.from_numpy(simplejpeg.decode_jpeg(jpeg, colorspace="RGB")).permute(2, 0, 1)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(device_decode, "check", lambda device: None)
    monkeypatch.setattr(device_decode, "decode", on_the_host)


@pytest.fixture(scope="module")
def dataset(shards):
    return ShardDataset(shards, "train")


def smooth(width, height):
    """A picture without fine detail, in which a pixel is what its neighbors are."""
    x, y = np.meshgrid(np.linspace(0, 3, width), np.linspace(0, 3, height))
    waves = np.stack([np.sin(x + y), np.cos(x - y), np.sin(x * 2) * np.cos(y)], axis=2)
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray((waves * 100 + 128).astype(np.uint8)), quality=98, colorsubsampling="444"
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("width", "height"), [(90, 61), (200, 301), (801, 77)])
def test_a_view_is_drawn_as_on_the_host(width, height, seed):
    view = random_view(width, height, CONFIG, sample_draws(seed, 0, 0)[:5], (96, 96))
    jpeg, square = smooth(width, height), np.empty((96, 96, 3), np.uint8)
    render(decode(jpeg, width, height, view.divisor, bgr=view.flip), view, square)
    drawn = draw_view(decode(jpeg, width, height), view, 96, 96)
    difference = (drawn.int() - torch.from_numpy(square).int()).abs().float()
    # Blocks averaged are not quite what the decoder gives when it divides the sides itself.
    assert difference.mean() < (0.01 if view.divisor == 1 else 1.5)
    assert difference.max() <= (1 if view.divisor == 1 else 16)


@pytest.mark.parametrize("config", [CONFIG, STRONG], ids=["single", "mosaic"])
def test_batches_are_the_same_but_for_rounding(dataset, anywhere, config):
    on_device = take(dataset, dataclasses.replace(config, decoder="gpu"), 6)
    for host, device in zip(take(dataset, config, 6), on_device, strict=True):
        assert host.image_ids == device.image_ids and host.scales == device.scales
        assert torch.equal(host.boxes, device.boxes) and torch.equal(host.labels, device.labels)
        assert torch.equal(host.color, device.color)
        assert device.images.shape == host.images.shape and device.images.dtype == torch.uint8
        assert device.images.is_contiguous(memory_format=torch.channels_last)
        assert (host.images.int() - device.images.int()).abs().float().mean() < 4


@pytest.mark.parametrize("broken", ["bytes", "size"])
def test_the_image_that_cannot_be_decoded_is_named(dataset, anywhere, broken, monkeypatch):
    read, chosen = dataset.read, take(dataset, CONFIG, 1)[0].image_ids[2]

    def damaged(index):
        data, record = read(index)
        if record["image_id"] == chosen:
            return (data[:100] if broken == "bytes" else smooth(31, 20)), record
        return data, record

    monkeypatch.setattr(dataset, "read", damaged)
    name = next(row["file_name"] for row in (read(i)[1] for i in range(len(dataset)))
                if row["image_id"] == chosen)  # fmt: skip
    with pytest.raises(DataError, match=f"image {name} in the shards at .* cannot be decoded") as caught:
        take(dataset, GPU, 1)
    assert "31x20 pixels, not" in caught.value.message or broken == "bytes"


def test_without_a_gpu_it_is_refused(dataset):
    with pytest.raises(ConfigError, match=r"loader\.decoder=gpu needs an NVIDIA GPU") as caught:
        take(dataset, GPU, 1)
    assert caught.value.fix == "set loader.decoder=cpu"


def test_without_the_package_it_is_refused(monkeypatch):
    old = types.ModuleType("torchcodec.decoders")  # before 0.16 it decoded videos only
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", old)
    with pytest.raises(ConfigError, match=r"needs the package torchcodec, 0\.16 or newer: ") as caught:
        check(torch.device("cuda", 0))
    assert "pip install" in caught.value.fix


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_decodes_the_same_batches(dataset):
    pytest.importorskip("torchcodec")
    gpu = torch.device("cuda", 0)
    for host, device in zip(take(dataset, CONFIG, 4), take(dataset, GPU, 4, device="cuda:0"), strict=True):
        assert device.images.device == gpu and torch.equal(host.boxes, device.boxes.cpu())
        assert (host.images.int() - device.images.cpu().int()).abs().float().mean() < 4
