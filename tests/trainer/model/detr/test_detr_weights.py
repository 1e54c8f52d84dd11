"""Weights in transformers' layout: both ways, and what does not fit is refused."""

import pytest
import safetensors.torch
import torch
from transformers import HGNetV2Backbone

from trainer.base.errors import CheckpointError
from trainer.config.architectures import ARCHITECTURES
from trainer.model.architecture import build

pytestmark = pytest.mark.slow
DETRS = [name for name, entry in ARCHITECTURES.items() if entry.extra == "detr"]
NAMES = ["red", "green", "blue"]


@pytest.fixture
def file_of(tmp_path):
    """Save a model with transformers' own `save_pretrained`; returns the tensors of the file."""

    def write(model):
        model.save_pretrained(tmp_path)
        return safetensors.torch.load_file(tmp_path / "model.safetensors")

    return write


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((name, {}) for name in DETRS if name != "deimv2"),
        ("dfine", {"frozen_norm": True}),
        ("rtdetr", {"frozen_norm": True}),
    ],
)
def test_what_transformers_saves_loads_here(architecture, options, network, file_of, batch):
    detector = network(architecture)
    torch.manual_seed(5)
    theirs = detector.upstream(network(architecture, **options).library_config).eval()
    said = detector.load_upstream(file_of(theirs), "file")
    assert "tensors" in said and "new" not in said
    pixels = batch([1]).images / 255
    with torch.no_grad():
        expected = theirs(pixel_values=pixels)
        ours = detector.eval().outputs(pixels, None)
    torch.testing.assert_close(ours.logits[:, -1], expected.logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.boxes[:, -1], expected.pred_boxes, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", [name for name in DETRS if name != "deimv2"])
def test_ours_load_in_transformers(architecture, network, tmp_path, batch):
    detector = network(architecture).eval()
    written = detector.upstream_weights(NAMES)
    for name, content in written.files.items():
        (tmp_path / name).write_bytes(content)
    safetensors.torch.save_file(written.state, tmp_path / "model.safetensors", {"format": "pt"})
    theirs, report = detector.upstream.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert theirs.config.id2label == dict(enumerate(NAMES)) and written.num_classes == 3
    pixels = batch([1]).images / 255
    with torch.no_grad():
        ours, expected = detector.outputs(pixels, None), theirs.eval()(pixel_values=pixels)
    torch.testing.assert_close(ours.logits[:, -1], expected.logits, rtol=1e-3, atol=1e-4)
    again = network(architecture)
    again.load_upstream(written.state, "file")
    for name, value in detector.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, again.state_dict()[name]), name


def test_other_classes_leave_the_heads_as_they_are(network, file_of):
    detector = network("dfine")
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    wider = build(detector.config, 7)
    said = detector.load_upstream(file_of(whole(wider)), "file")
    assert "the classification layer starts from scratch" in said
    for name, value in detector.state_dict().items():
        own = any(part in name for part in ("class_embed", "score_head"))
        source = before if own else wider.state_dict()
        assert torch.equal(value, source[name]) or name.endswith("num_batches_tracked"), name


def whole(detector):
    """transformers' own model with the same weights."""
    model = detector.upstream(detector.library_config)
    model.model.load_state_dict(detector.model.state_dict())
    return model


AUTHORS = (("embedder.", "stem."), ("encoder.", ""), (".convolution.", ".conv."), (".normalization.", ".bn."))
"""Names of PPHGNetV2's tensors in transformers, and by its authors, as D-FINE's file and timm have them."""


@pytest.mark.parametrize("by_its_authors", [False, True])
def test_a_backbones_weights(by_its_authors, network, file_of):
    detector = network("dfine")
    torch.manual_seed(9)
    backbone = HGNetV2Backbone(detector.library_config.backbone_config)
    state = file_of(backbone)
    for ours, theirs in AUTHORS if by_its_authors else ():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    if by_its_authors:
        assert {"stem.stem1.conv.weight", "stages.1.downsample.bn.weight"} <= state.keys()
        state |= {"head.fc.weight": torch.zeros(3), "head.last_conv.0.weight": torch.zeros(3)}
    said = detector.load_upstream(state, "file")
    assert "all but the backbone starts from scratch" in said
    for name, value in backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(detector.model.backbone.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("loaded", "named"),
    [
        (("dfine", {"size": "s"}), "D-FINE n, 0.25 times as wide"),
        (("rtdetr", {}), "D-FINE n, 0.25 times as wide"),
        (("dfine", {"width": 0.5}), "D-FINE n, 0.25 times as wide"),
    ],
)
def test_weights_of_another_size_or_architecture_are_refused(loaded, named, network, file_of):
    state = file_of(whole(network(loaded[0], **loaded[1])))
    detector = network("dfine")
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"weights s3://b/w do not fit {named}") as caught:
        detector.load_upstream(state, "s3://b/w")
    assert "model.size" in caught.value.fix and len(str(caught.value).splitlines()) <= 9
    assert all(torch.equal(value, before[name]) for name, value in detector.state_dict().items())
