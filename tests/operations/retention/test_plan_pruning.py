"""What of a data root is needed, and why."""

import shutil
import time

from components import in_use, records
from operations import retention
from operations.retention import GRACE, MAX_RUN_SECONDS, pin
from operations.tuning.space import ENDED
from trainer import storage
from trainer.export import bundle

LATER = 2 * GRACE


def judged(root, keep=1, later=LATER):
    things = retention.Plan(str(root), keep, now=time.time() + later).artifacts
    return {name: thing.why for name, thing in things.items()}


def test_pinned_registered_and_signed_stay_with_their_data(root):
    root, old, _ = root
    assert pin(str(root), "night-01") == "runs/night-01"
    (root / "models" / "sample" / "v2" / bundle.SIGNATURE).write_text("{}")
    records.PublishedRecord("sample", "v1", "night-01", "http://registry").write(str(root))
    why = judged(root)
    assert why["runs/night-01"] == ["pinned", "sample@v1 was made by it"]
    assert why["models/sample/v1"] == ["registered at http://registry", "made by night-01: pinned"]
    assert "signed" in why["models/sample/v2"] and why["runs/night-02"]
    assert "run night-01 has it" in why[f"shards/{old['fingerprint']}"]
    assert not [name for name, reasons in why.items() if not reasons]


def test_a_running_run_keeps_its_data_and_what_it_began_with(root, began):
    root, old, _ = root
    began(root, "night-00", old, ended=False, weights=str(root / "runs/night-01/train/best.pt"))
    why = judged(root)
    assert why["runs/night-00"] == ["it has not ended"]
    assert why["runs/night-01"] == ["run night-00 began with its weights"]
    assert "run night-00 has it" in why[f"shards/{old['fingerprint']}"]
    assert not judged(root, later=2 * MAX_RUN_SECONDS)["runs/night-00"]  # Nobody goes on with it.


def test_a_run_without_a_record_keeps_all_data(root):
    root, old, _ = root
    (root / "lineage" / "runs" / "night-04.json").unlink()
    assert judged(root)[f"shards/{old['fingerprint']}"] == ["run night-04 has no record of its data"]


def test_a_run_that_begins_keeps_all_data_and_then_its_own(root, monkeypatch):
    root, old, new = root
    monkeypatch.setenv("KUBEDET_RUN_ID", "tonight")
    lender = f"s3://elsewhere/{root.name}/runs/night-01/train/best.pt"
    in_use.begin(str(root), lender)
    begins = ["the run tonight begins"]
    why = judged(root, later=0.9 * LATER)
    assert [reasons for name, reasons in why.items() if name.startswith(("raw/", "images/"))]
    assert why[f"shards/{old['fingerprint']}"][0] == begins[0]
    assert why["runs/night-01"][0] == begins[0] and not why["runs/night-02"]
    in_use.end(str(root), [f"shards/{new['fingerprint']}"])
    assert not judged(root, later=0.9 * LATER)[f"shards/{old['fingerprint']}"]
    # Nobody waits for its training that long.
    assert "the run tonight begins" in judged(root)[f"shards/{new['fingerprint']}"]
    late = judged(root, later=8 * GRACE)
    assert "the run tonight begins" not in late[f"shards/{new['fingerprint']}"]
    in_use.end(str(root), [])
    assert "the run tonight begins" not in judged(root)[f"shards/{new['fingerprint']}"]


def test_a_run_that_passed_is_not_over_before_its_model_is_published(root, began):
    root, old, _ = root
    folder = began(root, "night-00", old)
    (folder / "evaluation" / "gate.json").write_text('{"passed": true}')
    assert judged(root)["runs/night-00"] == ["it has not ended"]
    records.PublishedRecord("sample", "v0", folder.name, "").write(str(root))
    assert not judged(root)["runs/night-00"]


def test_trainings_of_a_search_go_when_all_its_trials_have_ended(root):
    study = root[0] / "tuning" / "lr"
    for name in ("trials/00000.json", "runs/00000/checkpoint.pt", "study.json"):
        (study / name).parent.mkdir(parents=True, exist_ok=True)
        (study / name).write_text('{"shards": "shards/0"}')
    assert judged(root[0])["tuning/lr/runs"] == ["its search has not ended"]
    (study / ENDED).write_text("{}")
    why = judged(root[0])
    assert not why["tuning/lr/runs"] and why["tuning/lr/trials"] == ["the record of a search"]
    assert "tuning/lr/study.json" not in why


def test_images_of_a_kept_source_go_one_by_one(root):
    root = root[0]
    things = retention.Plan(str(root), 1, now=time.time() + LATER).artifacts
    of_kept = [thing for name, thing in things.items() if name.startswith("images/") and thing.why]
    assert [thing.spare for thing in of_kept] == [{}]
    stray = next(root.joinpath(of_kept[0].name).rglob("*.*"))
    lost = stray.with_name(f"{stray.stem.rpartition('-')[0]}-0123456789abcdef.png")
    lost.write_bytes(b"bytes")
    things = retention.Plan(str(root), 1, now=time.time() + LATER).artifacts
    assert things[of_kept[0].name].spare == {f"{lost.parent.name}/{lost.name}": 5}
    assert things[of_kept[0].name].freed == 5


def test_runs_elsewhere_are_judged_where_a_record_tells_of_them(root, tmp_path, began):
    root, old, _ = root
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root / "runs" / "night-02", elsewhere / "night-90" / "inner")
    folder = began(root, "night-91", old)
    folder.rename(elsewhere / "night-91")
    record = root / "lineage" / "runs" / "night-91.json"
    content = storage.read_json(str(record))
    storage.write_json(str(record), content | {"output": str(elsewhere / "night-91")})
    shutil.copytree(elsewhere / "night-91", elsewhere / "night-01")
    things = retention.Plan(str(root), 1, now=time.time() + LATER, runs=str(elsewhere)).artifacts
    assert things["runs/night-90"].why[0] == "no record of the data root says that it is a run"
    assert things["runs/night-91"].why == ["one of the newest 1 runs"]
    assert "has a run of that name too" in things["runs/night-01"].why[0]
