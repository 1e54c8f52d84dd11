"""Whether a run trains, and how one ends that does not."""

import json
import shutil
from pathlib import Path

import pytest
from bundles import make_bundle

from trainer.base.errors import ConfigError
from trainer.config import parsing
from trainer.data import dataset_diff
from trainer.data import download as downloading
from trainer.data.raw_folder import read_manifest
from trainer.export import bundle, published_models
from trainer.model import recipes
from trainer.steps import records, train
from trainer.steps.download import download
from trainer.steps.manifests import NothingNew
from trainer.steps.shard import shard
from trainer.steps.starting_weights import check_warm_start, warm_start_overrides

OVERRIDES = {"data.processes": 1, "data.threads": 2}
SOURCE = "sample:images=24,size=96,seed=4"


@pytest.fixture
def champion(tmp_path):
    """A data root with shards of a source and a model of that name that was trained on them."""
    root = str(tmp_path / "root")
    shards = shard(download(SOURCE, root, "debug", OVERRIDES))
    folder = Path(make_bundle(tmp_path / "made", name="sample", version="v7"))
    metadata = json.loads((folder / bundle.METADATA).read_text())
    metadata["trained_on"]["shards"] = shards.fingerprint
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.write_checksums(folder)
    published_models.publish(str(folder), root, "sample")
    return root


def files_of(root):
    return sorted(path for path in Path(root).rglob("*") if "lineage" not in path.parts)


def test_nothing_new_ends_the_run_before_any_image_is_fetched(champion):
    before = files_of(champion)
    for _ in range(2):  # The step is tried again.
        ended = download(SOURCE, champion, "debug", OVERRIDES, min_new_images=1, run_id="night-2")
        assert isinstance(ended, NothingNew)
        assert (ended.since, ended.model, ended.model_version) == ("sample v7", "sample", "v7")
        assert ended.found.startswith("0 new, 0 changed, 0 removed")
    assert files_of(champion) == before
    (record,) = records.NothingNewRecord.read_all(champion)
    assert (record.run_id, record.since) == ("night-2", "sample v7")
    # Without the condition a run always trains.
    assert download(SOURCE, champion, "debug", OVERRIDES).kind == "raw data"


@pytest.mark.slow
def test_a_run_trains_if_enough_images_are_new(champion):
    larger = SOURCE.replace("24", "25")
    (raw,) = Path(champion, "raw").iterdir()
    listed = downloading.plan(larger, champion, recipes.load("debug", OVERRIDES).data)
    changed = dataset_diff.compare(listed, read_manifest(str(raw))).image_count
    assert changed >= 1
    few = download(larger, champion, "debug", OVERRIDES, min_new_images=changed + 1)
    assert few.kind == "nothing new"
    raw = download(larger, champion, "debug", OVERRIDES, min_new_images=changed)
    shards = shard(raw)
    # Images of a model that the gate refused are not tried again.
    output = f"{champion}/runs/night-1"
    records.record_run(shards, output, run_id="id-1", image="", weights="", overrides={})
    records.VerdictRecord("night-1", False, {}).write(champion)
    ended = download(larger, champion, "debug", OVERRIDES, min_new_images=1)
    assert ended.since == "night-1, whose model was held back"


@pytest.mark.parametrize("deleted", ["raw", "shards"])
def test_a_run_trains_if_the_data_of_the_model_were_deleted(champion, deleted):
    shutil.rmtree(Path(champion, deleted))
    assert download(SOURCE, champion, "debug", OVERRIDES, min_new_images=1).kind == "raw data"


def test_a_warm_start_has_the_champions_weights_and_a_quarter_of_the_epochs(champion, caplog):
    caplog.set_level("INFO")
    assert warm_start_overrides("debug", {"train.epochs": 9}, champion, "sample")["train.epochs"] == 9
    shorter = warm_start_overrides("small", {}, champion, "sample")
    assert shorter["train.epochs"] == recipes.load("small").train.epochs // 4
    assert shorter["model.weights"] == f"{champion}/models/sample/v7/model.safetensors"
    assert "warm start from the weights of sample v7" in caplog.text
    assert warm_start_overrides("small", {}, champion, "another") == {}
    with pytest.raises(ConfigError, match="warm_start 'best'"):
        check_warm_start("best")
    with pytest.raises(ConfigError, match=r"is retinanet, but that of the recipe is dfine"):
        warm_start_overrides("small", {"model.architecture": "dfine"}, champion, "sample")


def test_a_warm_run_that_was_begun_keeps_its_configuration(champion, tmp_path):
    run = str(tmp_path / "run")
    shards = shard(download(SOURCE, champion, "debug", OVERRIDES | {"export.other_classes": True}))
    first = train.configure(shards, run, "champion")
    assert first.model.weights.endswith("sample/v7/model.safetensors")
    parsing.write(f"{run}/config.json", first)
    published_models.publish(make_bundle(tmp_path / "next", name="sample", version="v8"), champion, "sample")
    assert train.configure(shards, run, "champion") == first
