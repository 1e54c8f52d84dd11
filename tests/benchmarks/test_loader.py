"""The loader's benchmark: what it counts, and its decoders."""

import argparse
import sys

import pytest
import simplejpeg
import torch

from benchmarks import common, loader
from benchmarks.pictures import make_shards
from trainer.data import device_decode
from trainer.data.batch import PADDING
from trainer.data.shard_index import ShardDataset

CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch):
    """Run the program; gives its exit code."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks/loader.py", *arguments])
        return common.run(loader.main)

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--decoder", "gpu"], "--decoder gpu needs an NVIDIA GPU, and this process has "),
        (["--device", "cpu", "--cases", "1024:800"], "--cases: '1024:800' is no case"),
        (["--device", "cpu", "--cases", "1024x768"], "--cases: '1024x768' is no case"),
        (["--device", "cpu", "--cases", "640x480:50"], "--cases: '640x480:50' cannot be used:"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_told(arguments, message, run, capsys):
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and "\n  fix: " in shown.err and shown.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(run, capsys):
    assert run("--decoder", "gpu", "--device", "cuda") == 2
    assert "--device cuda: torch" in capsys.readouterr().err


def options(**changes):
    return argparse.Namespace(**{"device": CPU, "decoder": "cpu", "workers": 1, **changes})


@pytest.fixture
def seen(monkeypatch):
    """Batches that leave a loader, with its configuration."""
    batches = []

    class Noted(loader.TrainLoader):
        def batches(self, start):
            for batch in super().batches(start):
                batches.append((self._config, batch))
                yield batch

    monkeypatch.setattr(loader, "TrainLoader", Noted)
    return batches


def test_by_the_clock_each_decoder_is_measured_plain_and_augmented(shards, seen, monkeypatch):
    monkeypatch.setattr(device_decode, "check", lambda device: None)
    drawn = []

    def on_the_host(jpegs, device):
        drawn.append(len(jpegs))
        return [torch.from_numpy(simplejpeg.decode_jpeg(jpeg)).permute(2, 0, 1) for jpeg in jpegs]

    monkeypatch.setattr(device_decode, "decode", on_the_host)
    figures = loader.by_the_clock(shards, 96, 2, options(decoder="gpu"))
    ways = ["loader", "augmented", "gpu_loader", "gpu_augmented"]
    assert list(figures) == [f"{way}_wall" for way in ways] and all(rate > 0 for rate in figures.values())
    assert drawn and set(drawn) == {loader.BATCH}
    # 24 images make three batches, after as many as lie ready.
    counts = [(config.decoder, config.scale != [1, 1], batch.color is not None) for config, batch in seen]
    samples = 2 * (3 + seen[0][0].prefetch)
    assert {key: counts.count(key) for key in counts} == {
        (decoder, changed, changed): samples for decoder in ("cpu", "gpu") for changed in (False, True)
    }


def test_the_cpus_time_is_of_all_ways(shards, seen):
    figures = loader.measure(shards, 96, 1, 1)
    assert figures["decode_ms"] > 0 and figures["share_of_limit"] == pytest.approx(
        figures["loader"] / figures["half_dct"]
    )
    assert figures["augmented_share"] == pytest.approx(figures["augmented"] / figures["loader"])
    assert figures["resize_ms"] == pytest.approx(1e3 / figures["one_thread"] - figures["decode_ms"])
    assert "full_decode" not in figures, "nothing is divided: it would be the limit itself"
    images = len(ShardDataset(shards, "train"))
    plain = [batch for config, batch in seen if batch.color is None]
    assert len(plain) == len(seen) / 2 == 2 * images / loader.BATCH
    assert all((batch.labels != PADDING).any() for batch in plain)


def test_what_the_decoder_divides_is_measured_whole_as_well(tmp_path):
    figures = loader.measure(make_shards(tmp_path / "made", 8, 256, 192), 96, 1, 1)
    assert figures["full_decode"] > 0


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ("cpu", ["loader_wall_1024x768_to_800", "augmented_wall_1024x768_to_800"]),
        ("gpu", ["gpu_loader_wall_1024x768_to_800", "gpu_augmented_wall_1024x768_to_800"]),
    ],
)
def test_on_a_gpu_the_loader_has_to_keep_up(decoder, expected):
    ways = ["loader", "augmented", "gpu_loader", "gpu_augmented"]
    figures = {f"{way}_wall_{case}": 1.0 for way in ways for case in ("640x480_to_512", "1024x768_to_800")}
    gpu = options(device=torch.device("cuda", 0), decoder=decoder)
    assert loader.keeping_up(figures, gpu) == dict.fromkeys(expected, 505)
    assert loader.keeping_up(figures, options(decoder=decoder)) == {}
