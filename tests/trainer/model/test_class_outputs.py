"""Outputs trimmed and widened: the same scores for the classes that stay."""

from types import SimpleNamespace

import pytest
import torch
from torchvision.models import get_weight

from trainer.model import pretrained
from trainer.model.architecture import build
from trainer.model.pretrained import load_pretrained
from trainer.model.retinanet.options import RetinaNetOptions

CONFIG = RetinaNetOptions(backbone="resnet18", backbone_width=8, fpn_channels=16, head_depth=1)
COCO = "torchvision:RetinaNet_ResNet50_FPN_V2_Weights.COCO_V1"


def logits(detector):
    images = torch.randint(0, 256, (1, 3, 128, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        levels, _ = detector.eval().outputs(detector.features(detector.normalize(images.to(torch.uint8))))
        return torch.cat([level.permute(0, 3, 1, 2).flatten(1, 2) for level in levels], dim=1)


def test_published_weights_are_trimmed_to_the_real_classes(monkeypatch):
    names = get_weight(COCO.removeprefix("torchvision:")).meta["categories"]
    real = [index for index, name in enumerate(names) if name not in ("__background__", "N/A")]
    assert len(names) == 91 and len(real) == 80 and real[0] == 1
    torch.manual_seed(5)
    published = build(CONFIG, 91)
    torch.nn.init.normal_(published.head.classification_head.cls_logits.bias)
    files = SimpleNamespace(state=published.state_dict, config_json={})
    monkeypatch.setattr(pretrained, "fetch_if_needed", lambda uri, data_root: files)
    detector = build(CONFIG, 80)
    load_pretrained(detector, COCO)
    assert torch.allclose(logits(detector), logits(published)[:, :, real], atol=1e-5)
    other = build(CONFIG, 12)
    before = other.state_dict()["head.classification_head.cls_logits.bias"].clone()
    load_pretrained(other, COCO)
    assert torch.equal(other.state_dict()["head.classification_head.cls_logits.bias"], before)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "outputs"), [(80, 91), (600, 601), (3, 4)])
def test_weights_go_to_torchvision_and_back(count, outputs, tmp_path):
    torch.manual_seed(7)
    trained = build(CONFIG, count)
    torch.nn.init.normal_(trained.head.classification_head.cls_logits.bias)
    coco = get_weight(COCO.removeprefix("torchvision:")).meta["categories"]
    names = [name for name in coco if name not in ("__background__", "N/A")] if count == 80 else []
    names = names or [f"class {number}" for number in range(count)]
    state = trained.upstream_weights(names).state
    theirs = build(CONFIG, outputs)
    theirs.load_state_dict(state)
    places = [coco.index(name) for name in names] if count == 80 else list(range(1, outputs))
    assert torch.allclose(logits(theirs)[:, :, places], logits(trained), atol=1e-5)
    torch.save(state, tmp_path / "theirs.pth")
    again = build(CONFIG, count)
    load_pretrained(again, str(tmp_path / "theirs.pth"))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in trained.state_dict().items())
