"""Pretrained weights: detectors and backbones, other classes, old names, wrong files."""

import dataclasses
import hashlib

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import multiprocessing
from weights_server import weights_server

from trainer.base.errors import CheckpointError, ConfigError, StorageError
from trainer.launching.distributed import World
from trainer.model.architecture import build
from trainer.model.pretrained import check_pretrained, load_and_broadcast, load_pretrained
from trainer.model.retinanet.options import RetinaNetOptions
from trainer.training import checkpoint

__all__ = ["weights_server"]

CONFIG = RetinaNetOptions(backbone="resnet18", backbone_width=8, fpn_channels=16, head_depth=2)
LOGITS = "head.classification_head.cls_logits.weight"


@pytest.fixture
def source():
    torch.manual_seed(1)
    return build(CONFIG, 3).state_dict()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_detector_with_the_same_classes(source, suffix, tmp_path):
    path = tmp_path / f"weights.{suffix}"
    save = torch.save if suffix == "pt" else safetensors.torch.save_file
    save(source, path)
    detector = build(CONFIG, 3)
    load_pretrained(detector, str(path))
    assert all(torch.equal(value, source[name]) for name, value in detector.state_dict().items())


def test_the_head_is_new_where_classes_differ(source, tmp_path):
    torch.save({"model": source}, tmp_path / "w.pth")
    detector = build(CONFIG, 7)
    before = detector.state_dict()[LOGITS].clone()
    load_pretrained(detector, str(tmp_path / "w.pth"))
    state = detector.state_dict()
    assert torch.equal(state[LOGITS], before)
    same = [name for name in state if "cls_logits" not in name]
    assert all(torch.equal(state[name], source[name]) for name in same)


@pytest.mark.parametrize("averaged", [True, False])
def test_a_step_checkpoint_gives_its_averaged_weights(averaged, source, tmp_path):
    ema = {name: value + 1 for name, value in source.items()} if averaged else None
    checkpoint.write({"config": "{}", "model": source, "ema": ema, "step": 3}, str(tmp_path / "step.pt"))
    detector = build(CONFIG, 3)
    load_pretrained(detector, str(tmp_path / "step.pt"))
    expected = ema or source
    assert all(torch.equal(value, expected[name]) for name, value in detector.state_dict().items())


def test_a_backbone_alone(source, tmp_path):
    body = {k.removeprefix("backbone.body."): v for k, v in source.items() if k.startswith("backbone.body.")}
    torch.save(
        {**body, "fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}, tmp_path / "resnet.pth"
    )
    detector = build(CONFIG, 3)
    load_pretrained(detector, str(tmp_path / "resnet.pth"))
    assert torch.equal(detector.backbone.body.conv1.weight, source["backbone.body.conv1.weight"])
    assert not torch.equal(detector.state_dict()[LOGITS], source[LOGITS])


def test_head_names_of_torchvision_before_0_14(tmp_path):
    config = dataclasses.replace(CONFIG, version="v1")
    new = build(config, 3).state_dict()
    old = {}
    for name, value in new.items():
        parts = name.split(".")
        if parts[0] == "head" and parts[2] == "conv":
            name = ".".join([*parts[:3], str(int(parts[3]) * 2), parts[5]])
        old[name] = value
    assert "head.regression_head.conv.2.weight" in old
    torch.save(old, tmp_path / "old.pth")
    detector = build(config, 3)
    load_pretrained(detector, str(tmp_path / "old.pth"))
    assert all(torch.equal(value, new[name]) for name, value in detector.state_dict().items())


def test_another_architecture_is_refused_by_name(source, tmp_path):
    torch.save(source, tmp_path / "w.pt")
    wider = build(dataclasses.replace(CONFIG, fpn_channels=32), 3)
    with pytest.raises(CheckpointError, match=r"backbone\.fpn.*in the file.*in the model"):
        load_pretrained(wider, str(tmp_path / "w.pt"))


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("torchvision:RetinaNet_Best", "torchvision has no weights"),
        ("w.txt", "cannot be read"),
        ("other.pt", "neither a torchvision RetinaNet nor a torchvision ResNet"),
    ],
)
def test_wrong_weights_are_said(uri, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.txt").write_text("no weights")
    torch.save({"linear.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises((CheckpointError, ConfigError), match=said):
        load_pretrained(build(CONFIG, 3), uri)
    with pytest.raises(StorageError, match="gone"):
        load_pretrained(build(CONFIG, 3), str(tmp_path / "gone.pt"))


def rank(number, uris, folder, results):
    """One process of two, each with other random weights, and a data root that only rank 0's exists for."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    torch.manual_seed(number)
    detector, said = build(CONFIG, 3), []
    for uri in uris:
        try:
            world = World(number, 2, torch.device("cpu"))
            load_and_broadcast(detector, uri, f"{folder}/root-{number}", world)
        except StorageError as error:
            said.append(error.message)
    results.put((number, {name: value.numpy() for name, value in detector.state_dict().items()}, said))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_process_fetches_for_all_and_all_get_its_error(source, weights_server, tmp_path):
    content = safetensors.torch.save(source)
    weights_server.files["w.safetensors"] = content
    digest = hashlib.sha256(content).hexdigest()
    uris = [f"{weights_server.url}/{path}" for path in ("gone.safetensors", f"w.safetensors#sha256={digest}")]
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    spawned = multiprocessing.start_processes(
        rank, (uris, str(tmp_path), results), nprocs=2, join=False, start_method="forkserver"
    )
    answers = [results.get() for _ in range(2)]
    spawned.join()
    for _, state, said in answers:
        assert "model.weights" in said[0] and said == answers[0][2]
        assert all((state[name] == value.numpy()).all() for name, value in source.items())
    assert weights_server.requests == ["w.safetensors"] and not (tmp_path / "root-1").exists()


def test_weights_that_do_not_fit_are_told_before_any_training(source, weights_server, tmp_path):
    weights_server.files["w.safetensors"] = safetensors.torch.save(source)
    uri = f"{weights_server.url}/w.safetensors"
    check_pretrained(dataclasses.replace(CONFIG, weights=uri), str(tmp_path))
    with pytest.raises(CheckpointError, match="do not fit RetinaNet"):
        check_pretrained(dataclasses.replace(CONFIG, weights=uri, fpn_channels=32), str(tmp_path))
    check_pretrained(CONFIG, str(tmp_path))
