"""Five nights on two sets of data, for what is kept of them and what is freed."""

import json
import shutil
from pathlib import Path

import pytest
from bundles import make_bundle

from trainer import storage
from trainer.export import bundle, published_models
from trainer.steps import records
from trainer.steps.download import download
from trainer.steps.shard import shard

ASKED = ("debug", {"data.processes": 1, "data.threads": 2})


def prepared(root, seed):
    return shard(download(f"sample:images=24,size=96,seed={seed}", str(root), *ASKED))


def run(root, name, shards, *, ended=True, weights=""):
    folder = root / "runs" / name
    shards = shards.model_copy(update={"data_root": str(root)})  # It may be a copy.
    records.record_run(shards, str(folder), run_id="", image="", weights=weights, overrides={})
    (folder / "train").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if ended:
        records.VerdictRecord(name, False, {}).write(str(root))
    record = root / "lineage" / "runs" / f"{name}.json"  # All began in the same second.
    content = json.loads(record.read_text())
    content.pop("sha256", None)
    storage.write_json(str(record), content | {"started": f"2026-01-{name[-2:]}T00:00:00+00:00"})
    return folder


def publish(root, made_at, version, folder, shards, registry=""):
    made = Path(make_bundle(made_at / version, name="sample"))
    metadata = json.loads((made / bundle.METADATA).read_text())
    metadata["model_version"] = version
    metadata["trained_on"] |= {"shards": shards.fingerprint, "checkpoint": str(folder / "train/best.pt")}
    (made / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.write_checksums(made)
    published_models.publish(str(made), str(root), "sample")
    records.PublishedRecord("sample", version, folder.name, registry).write(str(root))


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Five ended nights on two sets of data, of which four published a version."""
    tmp_path = tmp_path_factory.mktemp("nights")
    root = tmp_path / "root"
    old, new = (prepared(root, seed) for seed in (1, 2))
    for day in range(1, 6):
        folder = run(root, f"night-0{day}", old if day < 3 else new)
        if day < 5:
            publish(root, tmp_path, f"v{day}", folder, old if day < 3 else new)
    return root, old, new


@pytest.fixture
def root(nights, tmp_path):
    """A copy of the five nights."""
    return Path(shutil.copytree(nights[0], tmp_path / "root")), *nights[1:]


@pytest.fixture
def began():
    """Note down a run: (root, name, shards, ended=, weights=)."""
    return run
