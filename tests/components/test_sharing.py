"""Download and sharding by several pods: the result is that of one, whatever becomes of the assistants."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from at_once import at_once
from weights_server import weights_server

from components import environment, preparation, sharing, steps
from trainer import storage
from trainer.base.errors import DataError, StorageError
from trainer.data import download, shards
from trainer.launching import leases
from trainer.model import recipes

__all__ = ["weights_server"]

pytestmark = pytest.mark.slow
GIVEN = {"data.processes": 1, "data.threads": 2, "data.shard_bytes": 20_000}
CONFIG = recipes.load("debug", GIVEN).data
ASKED = ("debug", GIVEN)
SOURCE = "sample:images=24,size=96,seed=4"
RUN = "the-run"


@pytest.fixture(autouse=True)
def of_a_run(monkeypatch):
    monkeypatch.setenv(environment.RUN_ID, RUN)


def prepare(root, pods, version="", source=SOURCE, **settings):
    """Do what the leader does; return the index of the shards."""
    page = f"{root}-page"
    _, (made, _) = preparation.prepare(source, *ASKED, root, version, page, partitions=pods, **settings)
    return storage.read_json(storage.join(made["uri"], "index.json")) | {"uri": made["uri"]}


def shared(root, pods, version=""):
    """Prepare data with so many pods that begin at the same time; return the index of the shards."""
    assistants = [partial(sharing.assist, root, *ASKED, patience=60)] * (pods - 1)
    return at_once(partial(prepare, root, pods, version), *assistants)[0]


def contents(index):
    return {
        name: storage.read_bytes(f"{index['uri']}/{name}")
        for name in storage.list_files(index["uri"])
        if name != "index.json"
    }


def written_times(folder):
    """Return when each file was written, but for notes of who uses the data."""
    files = (path for path in folder.rglob("*") if path.is_file())
    notes = {"retention", "sharing"}
    return {path: path.stat().st_mtime_ns for path in files if not notes & set(path.parts)}


def test_the_result_is_that_of_one(tmp_path):
    one = prepare(str(tmp_path / "one"), 1)
    assert not (tmp_path / "one" / "sharing").exists()
    index = shared(str(tmp_path / "4"), 4)
    assert {**index, "uri": ""} == {**one, "uri": ""} and contents(index) == contents(one)
    assert len(list((tmp_path / "4" / "raw").rglob("*-of-8.parquet"))) == 8


def test_an_assistant_does_parts_of_both_phases(tmp_path):
    root = str(tmp_path)
    thread = threading.Thread(target=sharing.assist, args=(root, *ASKED))
    with sharing.lead(root, CONFIG, 2) as team:
        planned = download.plan(SOURCE, root, CONFIG)
        team.announce(sharing.FETCH, planned)
        thread.start()
        reports = Path(planned.uri, "fetched")
        wait_for(lambda: len(list(reports.glob("*-of-4.parquet"))) == 4)
        raw = download.join(planned, CONFIG, team.do(sharing.FETCH, planned))
        team.announce(sharing.WRITE, raw)
        wait_for(lambda: len(storage.list_files(storage.join(root, "sharing"))) == 2 * 8 + 2)
        shards.join(raw, root, CONFIG)
        assert shards.finished(raw, root, CONFIG) and download.finished(planned, CONFIG)
    thread.join(60)
    assert not thread.is_alive()


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def leading(tmp_path):
    """Begin to lead two pods, with four parts; return the leader, a plan, and the folder of its phase."""
    planned = download.plan(SOURCE, str(tmp_path), CONFIG)
    team = sharing.Team(str(tmp_path), CONFIG, 2)
    work = team.announce(sharing.FETCH, planned)
    return team, planned, tmp_path / "sharing" / RUN / work.token / sharing.FETCH


def test_the_part_of_an_assistant_that_failed_is_done_at_once(tmp_path):
    team, planned, phase = leading(tmp_path)
    with leases.hold(str(phase / "1"), "a pod", patience=0):
        pass
    assert team.do(sharing.FETCH, planned) == 4 and download.join(planned, CONFIG, 4)


def test_a_part_that_an_assistant_works_on_is_waited_for(tmp_path):
    team, planned, phase = leading(tmp_path)
    with leases.hold(str(phase / "3"), "a pod", patience=0):
        leader = threading.Thread(target=team.do, args=(sharing.FETCH, planned))
        leader.start()
        wait_for(lambda: len(list((phase / "finished").glob("*"))) == 3)
        leader.join(1.5)
        assert leader.is_alive()
        (phase / "finished" / "3").touch()
    leader.join(60)
    assert not leader.is_alive() and not list((phase.parents[2]).rglob("3-of-4.parquet"))


def test_assistants_end_when_the_leader_fails_but_not_when_it_is_tried_again(tmp_path):
    root = str(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        prepare(root, 2, source="coco:/nonexistent")
    sharing.assist(root, *ASKED, patience=600)
    with pytest.raises(StorageError), sharing.lead(root, CONFIG, 2):
        raise StorageError("the store is away", transient=True)
    begin = time.monotonic()
    sharing.assist(root, *ASKED, patience=1.5)  # It is gone, and waited for.
    assert time.monotonic() - begin >= 1.5


def test_an_assistant_without_a_leader_or_a_run_ends(tmp_path, monkeypatch, caplog):
    sharing.assist(str(tmp_path), *ASKED, patience=0.1)
    assert "no step `prepare` of this run" in caplog.text
    monkeypatch.delenv(environment.RUN_ID)
    sharing.assist(str(tmp_path), *ASKED)
    assert contents(prepare(str(tmp_path / "alone"), 3)) and not (tmp_path / "alone" / "sharing").exists()


def test_an_assistant_never_fails_its_step(tmp_path, monkeypatch, capfd):
    for name in ("KUBERNETES_SERVICE_HOST", steps.TRIES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    arguments = ("assist", "components.sharing:assist", str(tmp_path))
    assert steps.run(*arguments, "debug", {"data.threads": "many"}, needed=False) is None
    output = capfd.readouterr().err
    assert "data.threads" in output and "continues without this pod" in output
    prepare(str(tmp_path), 2)
    steps.run(*arguments, *ASKED, needed=False)


def test_files_of_earlier_runs_are_deleted_after_a_day(tmp_path, monkeypatch):
    prepare(str(tmp_path), 2)
    old, day = sorted((tmp_path / "sharing").rglob("*")), time.time() - 25 * 3600
    files = [path for path in old if path.is_file()]
    for path in files[1:]:
        os.utime(path, (day, day))
    monkeypatch.setenv(environment.RUN_ID, "another")
    prepare(str(tmp_path), 2)
    assert [path for path in files if path.exists()] == files[:1]


def test_weights_that_cannot_be_had_are_told_before_any_data(weights_server, tmp_path):
    asked = ("debug", {**GIVEN, "model.weights": "torchvision:ResNet50_Weights.IMAGENET1K_V2"})
    arguments = (SOURCE, *asked, str(tmp_path), "", str(tmp_path / "page"))
    with pytest.raises(StorageError, match=r"model\.weights: .* cannot be fetched") as caught:
        preparation.prepare(*arguments, trains=True, partitions=2)
    assert "model.weights=none" in caught.value.fix
    assert not written_times(tmp_path) and not list(tmp_path.joinpath("retention", "uses").iterdir())
    # A pipeline that ends with the shards trains nothing.
    assert preparation.prepare(*arguments)
