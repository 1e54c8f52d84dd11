"""`trainer export` with what cannot be exported: refused by name, and nothing is left behind."""

import os

import pytest
from bundles import make_bundle

from trainer.__main__ import main
from trainer.config.parsing import to_json
from trainer.export import formats
from trainer.model.architecture import build


@pytest.fixture
def export(untrained, shards, tiny, tmp_path, capsys):
    """Runs the command; returns exit code and stderr."""
    (tmp_path / "config.json").write_text(to_json(tiny()))

    def run(*words, checkpoint="", target="model", **changes):
        arguments = ["--checkpoint", checkpoint or untrained(**changes), "--shards", shards]
        arguments += ["--output", str(tmp_path / target), "--config", str(tmp_path / "config.json")]
        code = main(["export", *arguments, *words])
        return code, capsys.readouterr().err

    return run


def _nothing_is_left(folder):
    return not folder.exists() or not list(folder.iterdir())


def test_a_checkpoint_of_another_architecture(export, tiny, tmp_path):
    code, said = export(model=build(tiny(model__version="v1").model, 5).state_dict())
    assert code == 2 and "best.pt do not fit its own configuration" in said and "fix:" in said
    assert "Traceback" not in said and _nothing_is_left(tmp_path / "model")


def test_a_file_that_is_no_checkpoint(export, tmp_path):
    (tmp_path / "junk.pt").write_text("junk")
    code, said = export(checkpoint=str(tmp_path / "junk.pt"))
    assert code == 2 and "junk.pt" in said and "Traceback" not in said
    code, said = export(checkpoint=str(tmp_path / "none.pt"))
    assert code == 2 and "none.pt" in said and "Traceback" not in said


def test_classes_that_differ(export, tmp_path):
    code, said = export(categories=[{"id": label, "name": f"thing{label}"} for label in range(5)])
    assert code == 1 and "are not those of the shards" in said and "10 differ: circle, ring" in said
    assert "Traceback" not in said and _nothing_is_left(tmp_path / "model")


def test_a_format_that_is_not_supported(export, tmp_path):
    code, said = export("--set", 'export.formats=["onnx", "tflite"]')
    assert code == 2 and "export.formats.1" in said and "tflite" in said and "onnx-int8" in said
    assert not (tmp_path / "model").exists()


def test_a_target_that_cannot_be_written(export, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = export(target="file/model")
    assert code == 2 and "file/model" in said and "cannot write" in said and "Traceback" not in said
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        code, said = export(target="locked/model")
        assert code == 2 and "locked/model" in said and "Permission denied" in said


def test_a_key_that_cannot_sign(export, tmp_path, monkeypatch):
    pytest.importorskip("model_signing")
    (tmp_path / "key.pem").write_text("no key")
    monkeypatch.setenv("KUBEDET_SIGNING_KEY", str(tmp_path / "key.pem"))
    code, said = export(checkpoint="not even looked at")
    assert code == 1 and "cannot be signed with" in said and "key.pem" in said and "openssl" in said


def test_a_file_that_does_not_find_what_the_model_finds(export, tmp_path, monkeypatch):
    """In the place of the exporter: a file that finds one box in every image."""
    other = (tmp_path / "small", make_bundle(tmp_path / "small"))[0] / "model.onnx"
    monkeypatch.setattr(
        formats, "write_onnx", lambda graph, path, opset: path.write_bytes(other.read_bytes())
    )
    code, said = export()
    assert code == 1 and "the exported model (onnx) differs from the trained one on 4 images" in said
    assert "nothing was published" in said and _nothing_is_left(tmp_path / "model")
