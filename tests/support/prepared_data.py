"""A data root that the fault suite prepares, and what is expected of it."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from trainer.data.download import download
from trainer.data.shard_index import ShardDataset
from trainer.data.shards import shard
from trainer.model import recipes

CONFIG = recipes.load("debug", {"data.processes": 1, "data.max_bad_fraction": 0.0}).data
SOME_BAD = replace(CONFIG, max_bad_fraction=0.9)
BOTH = ("download", "shard")


class Prepared:
    """A source, a data root made of it, and the same command once more."""

    def __init__(self, source: str, root: str, config=CONFIG) -> None:
        self.source, self.root, self.config = source, root, config
        self.raw, self.index = self.again()

    def again(self):
        raw = download(self.source, self.root, self.config)
        return raw, shard(raw, self.root, self.config)

    @property
    def folders(self) -> list[Path]:
        return [Path(self.raw.uri), Path(self.index.uri)]


def believed(prepared: Prepared) -> dict:
    """All that a training and an evaluation take from the shards."""
    taken = {}
    for split in ("train", "val"):
        dataset = ShardDataset(prepared.index.uri, split)
        taken[split] = [dataset.annotations(), *(dataset.read(row) for row in range(len(dataset)))]
        taken[split].append([dataset.fingerprint, dataset.categories])
    return taken


def images_of(manifest) -> int:
    return sum(split.images for split in manifest.splits.values())


def mounts() -> bool:
    """Return whether this machine lets us mount what only one process sees."""
    command = ["unshare", "--mount", "mount", "--bind", "/", "/"]
    return shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True).returncode
