"""What the train step asks a launcher to run, and what it finds when that has ended."""

import logging
from typing import Any

from components.launchers.spec import JobSpec, from_fields, training
from trainer import recipes, storage
from trainer.config import to_json
from trainer.data.order import global_batch
from trainer.errors import LaunchError

logger = logging.getLogger(__name__)


def prepare(
    shards: str, output: str, recipe: str, overrides: dict[str, Any], nodes: int, nproc: int
) -> JobSpec:
    """Write the run's one configuration file and describe the job that trains by it.

    Args:
        shards: URI of the shards' folder.
        output: URI of the run's folder, which receives config.json and train/.
        recipe: name of a recipe.
        overrides: dotted configuration keys and their values.
        nodes: machines.
        nproc: processes on each machine.

    Raises:
        ConfigError: no such recipe or key, or a value that does not fit.
        DataError: there are fewer images than one step of all processes reads.
    """
    config = recipes.load(recipe, overrides)
    uri = storage.join(output, "config.json")
    arguments = ("train", "--config", uri, "--shards", shards, "--output", storage.join(output, "train"))
    job = from_fields(
        {"command": training(arguments), "nodes": nodes, "nproc": nproc}, where="the training job"
    )
    splits = storage.read_json(storage.join(shards, "index.json"))["splits"]
    # Here as well as in the loader: hundreds of processes need minutes to come that far.
    global_batch(
        splits.get("train", {}).get("samples", 0), batch_size=config.train.batch_size,
        accumulate=config.train.accumulate, processes=job.nodes * job.processes,
    )  # fmt: skip
    storage.write_bytes(uri, to_json(config).encode())
    return job


def result(shards: str, output: str) -> dict[str, Any]:
    """Return the manifest of the trained model: where it is, what it was made from, how good it is.

    Raises:
        LaunchError: the training ended well but left no checkpoint.
    """
    report = storage.join(output, "train", "result.json")
    if not storage.exists(report):
        raise LaunchError(
            f"the training ended without a result at {report}",
            fix="look at its log; on several machines the output must be a place that all of them share",
        )
    return {
        "kind": "model",
        "version": 1,
        "output": output,
        "config": storage.join(output, "config.json"),
        "shards": shards,
        "checkpoint": storage.join(output, "train", "best.pt"),
        **storage.read_json(report),
    }
