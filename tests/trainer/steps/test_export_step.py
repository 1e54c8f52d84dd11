"""The step `export`: where it publishes, and what stays if it fails."""

import pytest
from bundles import make_bundle

from trainer import storage
from trainer.base.errors import ExportError
from trainer.config.parsing import to_json
from trainer.export import export as exporting
from trainer.export import published_models
from trainer.model import recipes
from trainer.steps.export import export
from trainer.steps.manifests import TrainedModel
from trainer.steps.records import PublishedRecord


@pytest.fixture
def trained(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(to_json(recipes.load("debug", {"export.name": "pets"})))
    root = str(tmp_path / "data_root")
    return TrainedModel(
        data_root=root, output=str(tmp_path / "run"), shards=f"{root}/shards/f00d", metrics={}
    )


@pytest.fixture
def exports(monkeypatch, tmp_path):
    """Instead of an export, which takes many seconds: a bundle of that version appears."""
    calls = []

    def write(version):
        def write_bundle(checkpoint, shards, output, config, *, evaluation_uri, signing_key):
            calls.append((checkpoint, shards, output, evaluation_uri, signing_key))
            if version == "bad":
                raise ExportError("the exported model differs")
            make_bundle(tmp_path / version, version=version)
            (tmp_path / version).rename(output)

        monkeypatch.setattr(exporting, "export", write_bundle)
        return calls

    return write


def test_it_publishes_under_the_data_root(trained, exports, tmp_path):
    calls = exports("v1")
    bundle = export(trained, signing_key="/keys/private.pem", registry="http://registry")
    run = tmp_path / "run"
    folders = (trained.shards, str(run / "model"), str(run / "evaluation"))
    assert calls == [(str(run / "train" / "best.pt"), *folders, "/keys/private.pem")]
    assert (bundle.name, bundle.model_version) == ("pets", "v1")
    assert bundle.model == str(tmp_path / "data_root" / "models" / "pets" / "v1")
    assert storage.read_json(str(tmp_path / "data_root/models/pets/current"))["model"] == bundle.model
    assert (run / "model" / "model.onnx").is_file()
    (record,) = PublishedRecord.read_all(trained.data_root)
    assert (record.name, record.run, record.registry) == ("pets@v1", "run", "http://registry")


def test_a_failed_export_leaves_the_current_version(trained, exports, tmp_path):
    published_models.publish(make_bundle(tmp_path / "v0", version="v0"), trained.data_root, "pets")
    exports("bad")
    with pytest.raises(ExportError):
        export(trained)
    assert published_models.read_current(trained.data_root, "pets").version == "v0"
