"""Whole networks against their authors': the same file gives the same logits and boxes.

authors_networks.json.gz holds, for each network, the names and shapes of the `state_dict` that the authors'
code builds, the constants in it, and what that network computed in evaluation mode in fp64: its ten best
logits, and sum and norm of all logits and boxes. Its weights were `drawn`; of DEIMv2, `Tensor.float` was
`Tensor.double`, as its norms use it, and positions were fp64. Repositories and commits:
github.com/Peterande/D-FINE 4a1f73a, lyuwenyu/RT-DETR 068dfde, roboflow/rf-detr 35ac6ab,
Intellindust-AI-Lab/DEIMv2 0fff8d4.
"""

import argparse
import gzip
import json
import math
import re
import zlib
from pathlib import Path

import pytest
import torch

from trainer.base.errors import CheckpointError
from trainer.model.architecture import build
from trainer.model.deimv2.options import Deimv2Options
from trainer.model.dfine.options import DFineOptions, RTDetrOptions
from trainer.model.pretrained import load_pretrained
from trainer.model.rfdetr.options import RFDetrOptions

AUTHORS = json.loads(gzip.decompress(Path(__file__).with_name("authors_networks.json.gz").read_bytes()))
OPTIONS = {
    "dfine n": DFineOptions(size="n"),
    "rtdetr r18": RTDetrOptions(size="r18"),
    "rfdetr nano": RFDetrOptions(size="nano"),
    "deimv2 n": Deimv2Options(size="n"),
    "deimv2 s": Deimv2Options(size="s"),
    "deimv2 x": Deimv2Options(size="x"),
}


def drawn(name, shape):
    """Weights of a layer that passes on about as much as it gets."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith("running_var"):
        return 0.5 + torch.rand(shape, generator=draw)
    values = torch.randn(shape, generator=draw)
    if len(shape) > 1:
        return values / math.sqrt(math.prod(shape[1:]))
    return 1 + 0.1 * values if name.endswith("weight") else 0.1 * values


def authors_file(which):
    """Tensors as the authors' code names them."""
    constants = {name: torch.tensor(value) for name, value in AUTHORS[which]["constants"].items()}
    return {
        name: constants[name].reshape(shape) if name in constants else drawn(name, shape)
        for name, shape in AUTHORS[which]["names"].items()
    }


def published(which):
    """The file as its authors publish it."""
    state = authors_file(which)
    if which.startswith("rfdetr"):
        return {"model": state, "args": argparse.Namespace(lr=1.0), "epoch": 3}
    return {"date": "2024", "model": {}, "ema": {"module": state, "updates": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("which", OPTIONS)
def test_the_authors_file_gives_the_authors_logits_and_boxes(which, tmp_path):
    theirs = AUTHORS[which]
    classes = next(
        shape[0]
        for name, shape in theirs["names"].items()
        if re.search("(score_head|class_embed).*bias", name)
    )
    detector = build(OPTIONS[which], classes).double().eval()
    torch.save(published(which), tmp_path / "theirs.pth")
    load_pretrained(detector, str(tmp_path / "theirs.pth"))
    image = torch.rand(1, 3, theirs["size"], theirs["size"], generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        if detector.normalizes_pixels:
            image = (image.double() - detector.pixel_mean) / detector.pixel_deviation
        outputs = detector.outputs(image.double(), None)
    logits, boxes = outputs.logits[0, -1], outputs.boxes[0, -1]
    sums = [value.item() for part in (logits, boxes) for value in (part.sum(), part.norm())]
    assert sums == pytest.approx(theirs["sums"], rel=1e-6)
    assert logits.flatten().topk(10).values.tolist() == pytest.approx(theirs["scores"], rel=1e-6)


def test_a_file_of_other_weights_is_refused_by_name(tmp_path):
    detector = build(OPTIONS["dfine n"], 80)
    torch.save({"ema": {"module": authors_file("rtdetr r18")}}, tmp_path / "theirs.pth")
    with pytest.raises(CheckpointError, match=r"theirs\.pth do not fit D-FINE n:\n"):
        load_pretrained(detector, str(tmp_path / "theirs.pth"))


def test_weights_choose_the_queries_of_groups():
    names = AUTHORS["rfdetr nano"]["names"]
    assert RFDetrOptions().options_from_weights({}, names) == {"groups": 13, "queries": 300}
    assert RFDetrOptions().options_from_weights({"group_detr": 10}, names) == {"groups": 10, "queries": 390}
    assert RFDetrOptions().options_from_weights({}, {"backbone.a": (3,)}) == {}
