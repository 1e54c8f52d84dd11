"""Whether a run pays, and how one ends that does not."""

import json
import shutil
from pathlib import Path

import pytest
from bundles import make_bundle

from components import preparation, records, training
from components.hooks import NOTHING_NEW, Outcome
from components.jobs import Request
from components.starting_weights import check_warm_start, from_champion
from operations import lineage, retrain_condition
from trainer.base.errors import ConfigError
from trainer.config import parsing
from trainer.data import dataset_diff, download
from trainer.data.raw_folder import read_manifest
from trainer.export import bundle, published_models
from trainer.model import recipes

GIVEN = {"data.processes": 1, "data.threads": 2}
ASKED = ("debug", GIVEN)
SOURCE = "sample:images=24,size=96,seed=4"
CLASSES = ["circle", "square", "triangle"]


@pytest.fixture
def champion(tmp_path):
    """A data root with shards of a source and a model of that name that was trained on them."""
    root = str(tmp_path / "root")
    _, (shards, _) = preparation.prepare(SOURCE, *ASKED, root, "", str(tmp_path / "page.html"))
    folder = Path(make_bundle(tmp_path / "made", name="sample", version="v7"))
    metadata = json.loads((folder / bundle.METADATA).read_text())
    metadata["trained_on"]["shards"] = shards["fingerprint"]
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.seal(folder)
    published_models.publish(str(folder), root, "sample")
    return root


def data_of(root):
    """Return all that is below a data root, but for the files of shared work."""
    return sorted(path for path in Path(root).rglob("*") if "sharing" not in path.parts)


def prepare(source, root, tmp_path, least, **settings):
    page = tmp_path / "statistics.html"
    (_, _), (shards, shown) = preparation.prepare(
        source, *ASKED, root, "", str(page), trains=True, min_new_images=least, **settings
    )
    return shards, shown, page.read_text()


def test_nothing_new_ends_the_run_before_any_image_is_fetched(champion, tmp_path, caplog):
    caplog.set_level("INFO")
    before = data_of(champion)
    shards, shown, page = prepare(SOURCE, champion, tmp_path, 1, prune=1)
    assert shards["kind"] == "nothing new"
    assert shown["verdict"] == "nothing new since sample v7" and "since sample v7" in page
    assert "nothing new since sample v7: 0 new, 0 changed, 0 removed images" in caplog.text
    assert data_of(champion) == before and "deleted nothing" in caplog.text
    # Without the parameter a run always trains.
    assert prepare(SOURCE, champion, tmp_path, 0)[0]["kind"] != "nothing new"


@pytest.mark.slow
def test_as_many_as_are_asked_for_make_a_run_pay(champion, tmp_path):
    larger = SOURCE.replace("24", "25")
    (raw,) = Path(champion, "raw").iterdir()
    planned = download.plan(larger, champion, recipes.load(*ASKED).data)
    changed = dataset_diff.compare(planned, read_manifest(str(raw))).images
    assert changed >= 1
    assert prepare(larger, champion, tmp_path, changed + 1)[0]["kind"] == "nothing new"
    trained = prepare(larger, champion, tmp_path, changed)[0]
    assert trained["kind"] == "shards"
    # Images of a model that the gate refused are not tried again.
    records.record_run(champion, f"{champion}/runs/night-1", "id-1", trained, "debug", {}, "")
    records.VerdictRecord("night-1", False, {}).write(champion)
    assert prepare(larger, champion, tmp_path, 1)[0]["since"] == "night-1, whose model was held back"


@pytest.mark.parametrize("gone", ["raw", "shards"])
def test_a_run_trains_if_the_data_of_the_model_were_deleted(champion, tmp_path, gone):
    shutil.rmtree(Path(champion, gone))
    assert prepare(SOURCE, champion, tmp_path, 1)[0]["kind"] == "shards"


def test_nothing_new_is_told_and_noted_once_for_a_run(champion, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(retrain_condition.notifications, "tell", told.append)
    monkeypatch.setenv("KUBEDET_RUN_ID", "night-2")
    for _ in range(2):  # The step is tried again.
        prepare(SOURCE, champion, tmp_path, 1)
    monkeypatch.setenv("KUBEDET_RUN_ID", "night-3")
    prepare(SOURCE, champion, tmp_path, 1)
    reason = "nothing new since sample v7: 0 new, 0 changed, 0 removed images"
    assert told == [Outcome(NOTHING_NEW, run, reason, "sample", "v7") for run in ("night-2", "night-3")]
    assert lineage.without_news(champion) == {"night-2", "night-3"}


def test_a_warm_start_has_the_champions_weights_and_a_quarter_of_the_epochs(champion, caplog):
    caplog.set_level("INFO")
    assert from_champion("debug", {"train.epochs": 9}, champion, "sample")["train.epochs"] == 9
    shorter = from_champion("small", {}, champion, "sample")
    assert shorter["train.epochs"] == recipes.load("small").train.epochs // 4
    assert shorter["model.weights"] == f"{champion}/models/sample/v7/model.safetensors"
    assert "warm start from sample v7" in caplog.text
    assert from_champion("small", {}, champion, "another") == {}
    with pytest.raises(ConfigError, match="warm_start 'best'"):
        check_warm_start("best")
    with pytest.raises(ConfigError, match=r"of model\.architecture retinanet, the recipe of dfine"):
        from_champion("small", {"model.architecture": "dfine"}, champion, "sample")


def test_a_warm_run_that_was_begun_keeps_what_it_began_with(champion, tmp_path):
    (shards,) = Path(champion, "shards").iterdir()
    run = str(tmp_path / "run")
    asked = (str(shards), run, "debug", {"export.other_classes": True}, Request(own={"nproc": 1}))
    training.prepare(*asked, warm_start="champion")
    first = parsing.read(f"{run}/config.json")
    assert first.model.weights.endswith("sample/v7/model.safetensors")
    published_models.publish(make_bundle(tmp_path / "next", name="sample", version="v8"), champion, "sample")
    training.prepare(*asked, warm_start="champion")
    assert parsing.read(f"{run}/config.json") == first
