"""Public reports about exported models: each situation, and what kubedet answers."""

import pytest
import torch
from bundles import SIZE, bright_model

from trainer.base.errors import ExportError
from trainer.config.types import NetworkInput
from trainer.data.decoding import read_sample
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardDataset
from trainer.export.formats import OnnxRuntime, write_onnx
from trainer.export.preprocess import preprocess
from trainer.export.verify import verify_exports
from trainer.launching.distributed import SINGLE
from trainer.model.architecture import build
from trainer.model.rfdetr.options import RFDetrOptions


def test_rf_detr_176_a_file_that_finds_less_is_not_published(shards, tiny, tmp_path):
    """A converted model lost most of its AP unnoticed; here files are run and compared first."""
    bright_model(tmp_path / "model.onnx")
    config = tiny(model__score_threshold=0.0)
    detector = build(config.model, 5).eval()
    with pytest.raises(ExportError, match="differs") as caught:
        verify_exports(tmp_path, ["onnx"], detector, ShardDataset(shards, "val"), config, NetworkInput(SIZE))
    assert "onnx" in caught.value.message


@pytest.mark.parametrize("resize", ["letterbox", "squash"])
@pytest.mark.parametrize("size", [(120, 40), (30, 90)])
def test_inference_2067_images_that_are_not_square(sets, tiny, resize, size):
    """Training fitted them into the square in another way than the server; here both see the same pixels."""
    sets.coco(
        [("a", 1, [4, 4, 8, 8])],
        {1: "cat"},
        change=lambda form: form["images"][0].update(dict(zip(("width", "height"), size, strict=True))),
    )
    sets.picture("train/a.jpg", size=size)
    dataset = sets.read("coco", val_fraction=0.0)
    config = tiny(loader__resize=resize, loader__fill=30).loader
    (batch,) = EvalLoader(dataset, config, batch_size=1, world=SINGLE, max_bad_fraction=0.0)
    pixels, _ = read_sample(dataset, 0)
    square, scales = preprocess(pixels.permute(1, 2, 0).numpy(), *NetworkInput(96, resize, 30))
    assert torch.equal(batch.images[0], square) and scales == pytest.approx(batch.scales[0])


@pytest.mark.slow
@pytest.mark.extra
def test_rf_detr_949_a_file_takes_batches_of_any_size(tmp_path):
    """The batch size of the export was a constant of RF-DETR's graph, and others were errors."""
    pytest.importorskip("transformers")
    options = RFDetrOptions(width=0.25, queries=10, groups=1, score_threshold=0.0)
    write_onnx(build(options, 3).fold_batchnorm().deployment_graph(128), tmp_path / "model.onnx")
    runtime = OnnxRuntime(tmp_path / "model.onnx")
    images = torch.randint(0, 256, (5, 3, 128, 128), dtype=torch.uint8).numpy()
    together, alone = runtime.run(images), [runtime.run(images[row : row + 1]) for row in range(5)]
    for index, values in enumerate(together):
        for row in range(5):
            assert alone[row][index][0] == pytest.approx(values[row], abs=1e-3)
