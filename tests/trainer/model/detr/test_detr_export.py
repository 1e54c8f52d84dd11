"""Detectors as they are exported after a training: on every validation image what the trained model finds."""

import dataclasses
import shutil

import pytest
import torch

from trainer.base.errors import ExportError
from trainer.data.decoding import read_sample
from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.data.transforms import fit
from trainer.export import formats, verify
from trainer.export.export import export
from trainer.export.formats import OnnxRuntime
from trainer.export.verify import EXACT, Comparison
from trainer.model import recipes
from trainer.model.architecture import Detections
from trainer.training import checkpoint
from trainer.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.extra]


MODELS = {
    "dfine": {"model.size": "n", "model.denoising": 30},
    "deimv2": {"model.denoising": 30},
    "rfdetr_finetune": {"model.groups": 3},
    "rfdetr_m": {"model.groups": 3},
    "deimv2_s": {"model.denoising": 30},
}
"""By architecture or recipe."""


@pytest.fixture(scope="module", params=MODELS)
def learnt(request, tmp_path_factory, tiny):
    """A detector after a hundred steps on the sample: its configuration, checkpoint and shards."""
    folder = tmp_path_factory.mktemp("learnt")
    config = tiny(
        train__epochs=5,
        train__validate_every=5,
        train__lr=2e-3,
        train__clip_norm=0.5,
        loader__resize="squash",
        loader__fill=0,
    )
    # All pairs of query and class: else the last one may be either of two that are alike.
    every = {"model.queries": 16, "model.detections_per_image": 80, "model.score_threshold": 0.0}
    kind = {} if request.param in recipes.RECIPES else {"model.architecture": request.param}
    options = {"model.width": 0.25, **MODELS[request.param], **every, **kind}
    options |= {"model.weights": "", "model.sync_batchnorm": False, "loader.sizes": []}
    config = dataclasses.replace(
        config, model=recipes.load("debug" if kind else request.param, options).model
    )
    raw = download("sample:images=80,seed=5,size=96", str(folder), config.data)
    shards = shard(raw, str(folder), config.data).uri
    return config, train(config, shards, str(folder / "run")), shards


@pytest.fixture(scope="module")
def exported(learnt, tmp_path_factory):
    """The bundle in fp32, of D-FINE also in int8, whatever that costs; what the export says of it."""
    config, trained, shards = learnt
    folder = tmp_path_factory.mktemp("model")
    formats = ["onnx", "onnx-int8"] if config.model.architecture == "dfine" else ["onnx"]
    changes = {"formats": formats, "max_ap_change_int8": 1.0, "check_images": 500}
    config = dataclasses.replace(config, export=dataclasses.replace(config.export, **changes))
    return folder, export(trained["checkpoint"], shards, str(folder), config)


def test_every_validation_image_has_the_boxes_scores_and_labels_of_the_model(learnt, exported):
    _, trained, shards = learnt
    detector, meta = checkpoint.load_model(trained["checkpoint"])
    images, square = ShardDataset(shards, "val"), meta["square"]
    assert square.resize == "squash"
    assert len(images) >= 10
    runtime, comparison = OnnxRuntime(exported[0] / "model.onnx"), Comparison(EXACT)
    for index in range(len(images)):
        fitted = fit(read_sample(images, index)[0], square)[0][None]
        served = Detections(*(torch.from_numpy(part) for part in runtime.run(fitted.numpy())))
        eager = detector.predict(fitted)
        assert eager.num.item() == served.num.item() == 80, index
        comparison.add(eager, served)
    matches = comparison.result()
    assert matches.matched == 1 and matches.detections > 10 * len(images)
    assert matches.score_error < 1e-3 and matches.box_error < 0.1


@pytest.mark.parametrize("learnt", ["dfine"], indirect=True)
def test_eight_bits_are_shipped_where_ap_holds_and_refused_where_not(learnt, exported, tmp_path, monkeypatch):
    config, trained, shards = learnt
    checks, images = exported[1]["formats"], len(ShardDataset(shards, "val"))
    assert checks["onnx"]["images"] == images and abs(checks["onnx"]["ap_change"]) < 1e-3
    assert checks["onnx-int8"]["matches"]["matched"] > 0.3
    sizes = [(exported[0] / name).stat().st_size for name in ("model.int8.onnx", "model.onnx")]
    assert sizes[0] < sizes[1]
    judge = verify._check_agreement

    def worse(name, change, *others):
        """As a network that eight bits cost more than is allowed."""
        judge(name, change - 0.01 * (name == "onnx-int8"), *others)

    monkeypatch.setattr(verify, "_check_agreement", worse)
    for write, name in (("write_onnx", "model.onnx"), ("quantize", "model.int8.onnx")):
        made = exported[0] / name  # What they would write again.
        monkeypatch.setattr(formats, write, lambda _, path, *others, made=made: shutil.copyfile(made, path))
    limits = {"formats": ["onnx", "onnx-int8"], "check_images": 500, "max_ap_change_int8": 0.002}
    config = dataclasses.replace(config, export=dataclasses.replace(config.export, **limits))
    with pytest.raises(ExportError, match=rf"\(onnx-int8\) differs .* on {images} images: COCO AP") as caught:
        export(trained["checkpoint"], shards, str(tmp_path / "model"), config)
    assert "export.max_ap_change_int8" in caught.value.message
    for words in ("remove onnx-int8 from export.formats", "nothing was published"):
        assert words in caught.value.fix
    assert not list(tmp_path.rglob("*.onnx"))
