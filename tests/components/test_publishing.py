"""The export step: where it publishes, and what it leaves when it fails."""

import json
from types import SimpleNamespace

import pytest
from bundles import make_bundle

from components import model_registry, publishing
from components.export import export as component
from components.publishing import export_and_publish
from trainer import recipes
from trainer.configuration import to_json
from trainer.errors import ConfigError, ExportError
from trainer.export import published_models


@pytest.fixture
def trained(tmp_path):
    """The manifest of a trained model whose data lie under a data root."""
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.json"
    config.write_text(to_json(recipes.load("debug", {"export.name": "pets"})))
    return {
        "output": str(tmp_path / "run"), "config": str(config), "checkpoint": "best.pt",
        "shards": str(tmp_path / "data_root" / "shards" / "f00d"),
    }  # fmt: skip


@pytest.fixture
def exports(monkeypatch, tmp_path):
    """In the place of an export, which takes many seconds: a bundle of that version appears."""
    asked = []

    def write(version):
        def export(checkpoint, shards, output, config, *, evaluation_uri, signing_key):
            asked.append((checkpoint, shards, output, evaluation_uri, signing_key))
            if version == "bad":
                raise ExportError("the exported model differs")
            made = make_bundle(tmp_path / version, version=version)
            (tmp_path / version).rename(output)
            return {"model": output, "name": "pets", "model_version": version, "made": made}

        monkeypatch.setattr(publishing, "export", export)
        return asked

    return write


def test_it_publishes_under_the_shards_data_root(trained, exports, tmp_path, monkeypatch):
    asked = exports("v1")
    monkeypatch.setattr(publishing, "mounted_key", lambda secret: f"/{secret}/private.pem")
    made = export_and_publish(trained, "keys")
    run = tmp_path / "run"
    places = (trained["shards"], str(run / "model"), str(run / "evaluation"))
    assert asked == [("best.pt", *places, "/keys/private.pem")]
    assert made["kind"] == "exported model" and made["version"] == 1 and made["model_version"] == "v1"
    assert made["model"] == str(tmp_path / "data_root" / "models" / "pets" / "v1")
    assert json.loads((tmp_path / "data_root/models/pets/current").read_text())["model"] == made["model"]
    assert (run / "model" / "model.onnx").is_file()


def test_a_failed_export_leaves_the_version_that_was_current(trained, exports, tmp_path):
    published_models.publish(make_bundle(tmp_path / "v0", version="v0"), str(tmp_path / "data_root"), "pets")
    exports("bad")
    with pytest.raises(ExportError):
        export_and_publish(trained)
    assert published_models.current(str(tmp_path / "data_root"), "pets")["version"] == "v0"


def test_a_name_that_is_none_is_refused_before_any_work(trained, exports, tmp_path):
    asked = exports("v1")
    text = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").write_text(text.replace('"name": "pets"', '"name": "current"'))
    with pytest.raises(ConfigError, match="'current' cannot name a model"):
        export_and_publish(trained)
    assert not asked


def test_the_component_takes_the_model_and_the_name_of_a_secret(trained, exports, tmp_path, monkeypatch):
    inputs = {"model", "signing", "registry", "run_id", "credentials"}
    assert set(component.component_spec.inputs) == inputs
    asked = exports("v1")
    monkeypatch.setattr(publishing, "mounted_key", lambda secret: f"/mounted/{secret}/private.pem")
    (tmp_path / "trained.json").write_text(json.dumps(trained))
    model = SimpleNamespace(path=str(tmp_path / "trained.json"))
    told = SimpleNamespace(path=str(tmp_path / "exported.json"), metadata={})
    told_registry = []
    monkeypatch.setattr(model_registry, "register_model", lambda *given: told_registry.append(given))
    given = {"model": model, "signing": "ours", "run_id": "r1", "credentials": "s", "exported": told}
    component.python_func(registry="http://registry", **given)
    assert [(made["model_version"], server, run) for made, server, run in told_registry] == [
        ("v1", "http://registry", "r1")
    ]
    assert asked[0][-1] == "/mounted/ours/private.pem"
    assert told.metadata["model_version"] == "v1" and told.metadata["name"] == "pets"
    assert "private.pem" not in (tmp_path / "exported.json").read_text() + json.dumps(told.metadata)
