"""`kubedet evaluate`."""

import signal

import pytest
import torch

from components.launchers import guarded_process
from pipelines import evaluation
from trainer import storage
from trainer.__main__ import _parser as trainer_parser
from trainer.config import parsing
from trainer.data.shard_index import ShardDataset
from trainer.model.architecture import build
from trainer.training import checkpoint


@pytest.fixture
def write_model(tiny, shards, tmp_path):
    def write(name="best.pt", **changes):
        torch.manual_seed(0)
        config = tiny(model__score_threshold=0.0)
        dataset = ShardDataset(shards, "test")
        uri = str(tmp_path / name)
        state = {
            "config": parsing.to_json(config),
            "categories": dataset.categories,
            "step": 7,
            "epoch": 1,
            "metrics": {},
            "fingerprint": dataset.fingerprint,
            "global_batch": 8,
            "model": build(config.model, len(dataset.categories)).state_dict(),
        }
        checkpoint.write({**state, **changes}, uri)
        return uri

    return write


@pytest.fixture
def model(write_model):
    return write_model()


@pytest.mark.slow
def test_a_checkpoint_is_scored_alone(kubedet, model, shards, tmp_path):
    output = tmp_path / "evaluation"
    words = ("evaluate", model, "--shards", shards, "-o", output, "--split", "val")
    code, out, _ = kubedet(*words, "--gate", "coco/AP >= 0.99")
    assert code == 1
    assert "precision      AP    AP50" in out and "gate: failed\n  coco/AP 0." in out
    assert f"report: {output}/report.html" in out
    summary = storage.read_json(str(output / "metrics.json"))
    assert summary["split"] == "val" and summary["predictions"] == f"{output}/predictions.parquet"
    assert "against" not in out
    code, out, _ = kubedet(*words[:5], tmp_path / "again", "--split", "val", "--baseline", output)
    assert code == 0 and f"against {output}: coco/AP +0.0000" in out
    assert "to +0.0000: too few to tell\n" in out
    # In tiles; predictions of whole images are not taken for it.
    whole = (tmp_path / "again" / "predictions.parquet").read_bytes()
    code, _, _ = kubedet(*words[:5], tmp_path / "again", "--split", "val", "--tile", "64")
    tiled = storage.read_json(str(tmp_path / "again" / "metrics.json"))
    assert (code, tiled["tile"], summary["tile"]) == (0, "64 px, overlap 0.2", "")
    assert (tmp_path / "again" / "predictions.parquet").read_bytes() != whole


def test_mistakes_are_refused_before_any_work(kubedet, model, shards, tmp_path):
    words = ("evaluate", model, "--shards", shards, "-o", tmp_path / "e")
    code, _, err = kubedet(*words, "--gate", "coco/AP == 1")
    assert code == 2 and "gate rule 'coco/AP == 1' cannot be read" in err
    code, _, err = kubedet(*words, "--gate", "mAP >= 0.5, coco/AP > 50")
    assert code == 2 and "'mAP >= 0.5' names an unknown metric" in err and "0.5 for 50 %" in err
    code, _, err = kubedet(*words, "--nproc", "-2")
    assert code == 2 and "nproc: " in err
    code, _, err = kubedet(*words, "--set", "evaluation.bootstap=5")
    assert code == 2 and "did you mean evaluation.bootstrap" in err
    code, _, err = kubedet("evaluate", tmp_path / "no.pt", *words[2:])
    assert code == 2 and "no.pt" in err
    assert not (tmp_path / "e").exists()


def test_several_processes_end_with_the_command(kubedet, model, shards, tmp_path, monkeypatch):
    class Stopped(guarded_process.GuardedProcess):
        def __init__(self, command, **settings):
            worker = trainer_parser().parse_args(command[3:]).arguments
            assert trainer_parser().parse_args(worker).checkpoint == model
            super().__init__(["sleep", "20"], **settings)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(evaluation, "GuardedProcess", Stopped)
    words = ("evaluate", model, "--shards", shards, "-o", tmp_path / "e", "--nproc", "2")
    code, _, err = kubedet(*words)
    assert code == 143 and "error: the evaluation was stopped" in err
    assert not (tmp_path / "e" / "metrics.json").exists()
