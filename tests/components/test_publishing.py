"""The export step: where it publishes, and what it leaves when it fails."""

import json
from types import SimpleNamespace

import pytest
from bundles import make_bundle

from components import model_registry, publishing
from components.export import export as component
from components.publishing import export_and_publish
from trainer import storage
from trainer.base.errors import ExportError
from trainer.config.parsing import to_json
from trainer.export import published_models
from trainer.model import recipes


@pytest.fixture
def trained(tmp_path):
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.json"
    config.write_text(to_json(recipes.load("debug", {"export.name": "pets"})))
    return {
        "output": str(tmp_path / "run"),
        "config": str(config),
        "checkpoint": "best.pt",
        "shards": str(tmp_path / "data_root" / "shards" / "f00d"),
    }


@pytest.fixture
def exports(monkeypatch, tmp_path):
    """In the place of an export, which takes many seconds: a bundle of that version appears."""
    calls = []

    def write(version):
        def export(checkpoint, shards, output, config, *, evaluation_uri, signing_key):
            calls.append((checkpoint, shards, output, evaluation_uri, signing_key))
            if version == "bad":
                raise ExportError("the exported model differs")
            exported = make_bundle(tmp_path / version, version=version)
            (tmp_path / version).rename(output)
            return {"model": output, "name": "pets", "model_version": version, "made": exported}

        monkeypatch.setattr(publishing, "export", export)
        return calls

    return write


def test_it_publishes_under_the_shards_data_root(trained, exports, tmp_path, monkeypatch):
    calls = exports("v1")
    monkeypatch.setattr(publishing, "signing_key", lambda secret: f"/{secret}/private.pem")
    exported = export_and_publish(trained, "keys")
    run = tmp_path / "run"
    places = (trained["shards"], str(run / "model"), str(run / "evaluation"))
    assert calls == [("best.pt", *places, "/keys/private.pem")]
    assert (
        exported["kind"] == "exported model"
        and exported["version"] == 1
        and exported["model_version"] == "v1"
    )
    assert exported["model"] == str(tmp_path / "data_root" / "models" / "pets" / "v1")
    assert storage.read_json(str(tmp_path / "data_root/models/pets/current"))["model"] == exported["model"]
    assert (run / "model" / "model.onnx").is_file()


def test_a_failed_export_leaves_the_version_that_was_current(trained, exports, tmp_path):
    published_models.publish(make_bundle(tmp_path / "v0", version="v0"), str(tmp_path / "data_root"), "pets")
    exports("bad")
    with pytest.raises(ExportError):
        export_and_publish(trained)
    assert published_models.current(str(tmp_path / "data_root"), "pets").version == "v0"


def test_the_component_takes_the_model_and_the_name_of_a_secret(trained, exports, tmp_path, monkeypatch):
    inputs = {"model", "signing", "registry", "run_id", "credentials"}
    assert set(component.component_spec.inputs) == inputs
    calls = exports("v1")
    monkeypatch.setattr(publishing, "signing_key", lambda secret: f"/mounted/{secret}/private.pem")
    (tmp_path / "trained.json").write_text(json.dumps(trained))
    model = SimpleNamespace(path=str(tmp_path / "trained.json"))
    artifact = SimpleNamespace(path=str(tmp_path / "exported.json"), metadata={})
    told_registry = []
    monkeypatch.setattr(model_registry, "register_model", lambda *given: told_registry.append(given))
    given = {"model": model, "signing": "ours", "run_id": "r1", "credentials": "s", "exported": artifact}
    component.python_func(registry="http://registry", **given)
    (told,) = told_registry
    assert told[0].endswith("/models/pets/v1") and told[1:] == ("http://registry", "r1")
    assert calls[0][-1] == "/mounted/ours/private.pem"
    assert artifact.metadata["model_version"] == "v1" and artifact.metadata["name"] == "pets"
    assert "private.pem" not in (tmp_path / "exported.json").read_text() + json.dumps(artifact.metadata)
