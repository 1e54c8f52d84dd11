"""Nights of a recurring run on a real Kubeflow Pipelines: when it trains, and what is left."""

import json
import os
import re

from tests.cluster.runs import MINUTES, Runs
from tests.cluster.user import until

DATA = {"download", "convert-to-shards"}
LOOK = """
import json
from operations import retention
from trainer import storage
from trainer.export import published_models
from trainer.steps.records import NothingNewRecord, PublishedRecord, RunRecord
root = {root!r}
records = sorted(RunRecord.read_all(root), key=lambda record: record.started)
nights = [record.run_id for record in records]
ids = {{record.run: record.run_id for record in records}}
versions = list(published_models.load_versions(root, "sample")[0])
kinds = [name.partition("/")[0] for name in retention.list_artifacts(root)]
published = {{record.name: record.run for record in PublishedRecord.read_all(root)}}
current = published_models.read_current(root, "sample").version
without_news = storage.list_files(NothingNewRecord.record_uri(root))
print("left " + json.dumps({{
    "trained": nights,
    "published": len(versions), "without_news": [name.removesuffix(".json") for name in without_news],
    "run": ids[published[f"sample@{{current}}"]],
    "counts": {{kind: kinds.count(kind) for kind in set(kinds)}},
}}))
"""
"""What a data root holds, printed by a pod that sees it."""


def test_six_firings_of_a_source_that_grows(host, cluster, pipeline_work, user):
    """Two for each state of the source: the first trains, the second finds nothing new."""
    runs = Runs(host, cluster, f"{pipeline_work}/nights-{os.getpid()}-{cluster.kind.name}")
    name = f"kubedet-nights-{os.getpid()}-{cluster.kind.name}"
    nights = []
    try:
        for images, gate in ((24, "coco/AP >= 0"), (30, "coco/AP >= 0"), (36, "coco/AP >= 1.0")):
            command = runs.submit(
                "--cron",
                "* * * * *",
                "--name",
                name,
                "--min-new-images",
                "2",
                "--prune",
                "1",
                verb="schedule create",
                source=f"sample:images={images},seed=8,size=96",
                gate=gate,
                epochs=2,
            )
            assert command.end() == 0, str(command)
            schedule_id = re.search(r"recurringrun/details/([0-9a-f-]{36})", str(command))[1]
            nights += until(lambda one=schedule_id: runs.ended(one, 2), f"two of {images}", 2 * MINUTES)
        history, code = user.runs("schedule", "history", "--host", host, "--name", name)
    finally:
        user.runs("schedule", "delete", "--host", host, "--name", name)
    ids = [run.run_id for run in nights]
    assert [run.state for run in nights] == ["SUCCEEDED"] * 6, ids
    assert code == 0 and all(one in str(history) for one in ids), str(history)
    for one, seen in zip(ids, ("1a", "1b", "2a", "2b", "3a", "3b"), strict=True):
        steps = {node.split(".")[-2].partition("(")[0] for node in runs.pods(one) if "executor" in node}
        expected = {"download", "cleanup"} if seen[1] == "b" else DATA | {"train", "evaluate", "cleanup"}
        assert steps == expected | ({"export"} if seen in ("1a", "2a") else set()), (seen, steps)
        said = runs.log(one, "download")
        assert ("nothing new since" in said) == (seen[1] == "b"), said
        pruned = said if seen[1] == "b" else runs.log(one, "convert-to-shards")
        assert "deleted" in pruned, pruned
        outcome = "nothing new" if seen[1] == "b" else "held back" if seen == "3a" else "passed"
        assert f"outcome: {outcome}" in runs.log(one, "cleanup"), seen
    assert "whose model was held back" in runs.log(ids[5], "download")
    left = _probe(user, runs.work)
    assert left["trained"] == [ids[0], ids[2], ids[4]] and left["published"] == 2
    assert {ids[1], ids[3], ids[5]} <= set(left["without_news"]) and left["run"] == ids[2]
    # Of a day's grace nothing goes yet; what is there, is there once.
    assert left["counts"]["runs"] == left["counts"]["shards"] == 3 and left["counts"]["images"] <= 3


def _probe(user, root):
    image = os.environ.get("KUBEDET_COMPONENT_IMAGE", os.environ["KUBEDET_IMAGE"])
    path, _ = user.python(LOOK.format(root=root), image=image)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 0, str(command)
    (line,) = [line for line in command.lines if "left {" in line]
    return json.loads(line[line.index("{") :])
