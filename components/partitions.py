"""Download and sharding by several pods: the parts of the work, and how each is done.

A part is {"plan": URI of the plan ("" where there is nothing to fetch), "partition": which, from 0,
"partitions": how many}, or, where the run does not pay, {"ended": the manifest that says so}. It is written
as JSON: Kubeflow's compiler types an item of a list as a string, and its driver refuses a mapping there.
Whatever the parts are, the result is the same: see `trainer.data.download`.
"""

import json
from typing import Any

from components import data_versions, occasion, starting_weights, usage
from components.retention import uses
from trainer import recipes, storage
from trainer.config import DataConfig
from trainer.data import download, raw_folder, shards
from trainer.errors import ConfigError

MOST = 256
"""Most partitions: each fetches into folders of its own, and there are 256 of them."""

Part = str
"""JSON of a part."""


def plan(
    source: str, data_root: str, recipe: str, overrides: dict[str, Any], version: str, partitions: int,
    trains: bool = False, min_new_images: int = 0, min_drift: float = 0.0,
) -> list[Part]:  # fmt: skip
    """List a source, write its annotations as tables, and divide the work.

    Args:
        source: see `trainer.data.sources`.
        data_root: see `trainer.data.download.download`.
        recipe: name of a recipe; its `data` section counts here.
        overrides: dotted configuration keys and their values.
        version: see `data_versions.fetch`.
        partitions: how many, 1 to MOST.
        trains: whether a training follows: its pretrained weights are then fetched first.
        min_new_images: see `occasion.Condition`. Where the run does not pay there is one part, which says
            so.
        min_drift: likewise.

    Raises:
        ConfigError: no such number of partitions, or the version cannot be a name.
        CheckpointError: the weights do not fit the detector.
        DataError: the source cannot be used.
        StorageError: the data root cannot be read or written.
    """
    usage.keep(data_root)
    check(partitions)
    whole = recipes.load_here(recipe, overrides)
    condition = occasion.Condition(min_new_images, min_drift)
    uses.begin(data_root, whole.model.weights)
    try:
        known = data_versions.known(source, data_root, whole.data, version)
        planned = known or download.plan(source, data_root, whole.data) if condition else None
        if planned and (ended := occasion.nothing_new(planned, data_root, whole, condition)):
            return [json.dumps({"ended": ended})]
        if trains:
            starting_weights.secure(recipe, overrides, data_root)
        planned = planned or known or download.plan(source, data_root, whole.data)
    except BaseException:
        uses.end(data_root, [])
        raise
    uri = "" if known else storage.join(planned["uri"], "plan.json")
    numbered = ({"plan": uri, "partition": part, "partitions": partitions} for part in range(partitions))
    return [json.dumps(part) for part in numbered]


def check(partitions: int) -> None:
    """Check a number of partitions.

    Raises:
        ConfigError: saying what it may be.
    """
    if not 1 <= partitions <= MOST:
        raise ConfigError(f"partitions {partitions} is not from 1 to {MOST}", fix="name another number")


def fetch(part: Part, recipe: str, overrides: dict[str, Any]) -> Part:
    """Fetch the images of a part; return it.

    Raises:
        DataError: far too many cannot be had.
        StorageError: the source or the data root cannot be reached.
    """
    fields = json.loads(part)
    if fields.get("plan"):
        # <data_root>/raw/<fingerprint>/plan.json
        data_root = storage.parent(storage.parent(storage.parent(fields["plan"])))
        usage.keep(data_root)
        uses.renew(data_root)
        config = recipes.load(recipe, overrides).data
        download.fetch_partition(_plan(fields["plan"]), config, *_numbers(fields))
    return part


def fetched(
    parts: list[Part], source: str, data_root: str, config: DataConfig, version: str,
    planned: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Put together what all parts fetched, or fetch everything where there are none.

    Args:
        parts: what `fetch` returned of each.
        source: see `data_versions.fetch`.
        data_root: see `data_versions.fetch`.
        config: see `data_versions.fetch`.
        version: see `data_versions.fetch`.
        planned: what the source holds, where there are no parts and it has been listed already.

    Returns:
        The raw manifest, with the version in it if there is one.

    Raises:
        DataError: more cannot be had than `data.max_bad_fraction` allows.
        StorageError: a part has not been fetched, or the data root cannot be reached.
    """
    plan_uri = json.loads(parts[0])["plan"] if parts else ""

    def put_together() -> dict[str, Any]:
        if plan_uri:
            return download.join(_plan(plan_uri), config, len(parts))
        assert planned is not None
        download.fetch_partition(planned, config)
        return download.join(planned, config)

    brings = plan_uri or (planned and planned["kind"] == "plan")
    return data_versions.fetch(source, data_root, config, version, put_together if brings else None)


def ended(parts: list[Part]) -> dict[str, Any] | None:
    """Return the manifest of nothing new, where the run does not pay; else None."""
    return json.loads(parts[0]).get("ended") if parts else None


def write(raw: dict[str, Any], data_root: str, recipe: str, overrides: dict[str, Any], part: Part) -> Part:
    """Write the shards of a part of the raw images; return it.

    Raises:
        DataError: a worker was killed, or the raw tables are damaged.
        StorageError: the data root cannot be read or written.
    """
    usage.keep(data_root)
    if occasion.is_nothing(raw):
        return part
    uses.renew(data_root)
    config = recipes.load(recipe, overrides).data
    shards.shard_partition(raw, data_root, config, *_numbers(json.loads(part)))
    return part


def _plan(uri: str) -> dict[str, Any]:
    return raw_folder.read_plan(storage.parent(uri))


def _numbers(part: dict[str, Any]) -> tuple[int, int]:
    return part["partition"], part["partitions"]
