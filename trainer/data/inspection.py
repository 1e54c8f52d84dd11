"""Describes data: images, boxes and classes of each split, sizes and shapes, and problems."""

from collections.abc import Iterator, Sequence
from typing import Any

from trainer import log
from trainer.config import DataConfig
from trainer.data import problem_counts as reasons
from trainer.data import statistics
from trainer.data.cleaning import clean
from trainer.data.data_views import RawImages, Shards, SourceRows, open_view
from trainer.data.images import SHARES, SHARES_UPRIGHT
from trainer.data.problem_counts import Problems
from trainer.errors import DataError

_OF_PIXELS = ("box_side", "box_share", "box_aspect", "image_side", "image_aspect")
_STAND_IN = 1000


def inspect(text: str, boxes_from: str = "bbox", allow_hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Describe shards, raw images or a source.

    Args:
        text: a URI of either folder, or a source as `trainer.data.sources` takes it.
        boxes_from: of a source, see `trainer.config.DataConfig`.
        allow_hosts: likewise.

    Returns:
        kind, uri (of a source what names it fully), read_as (how a source was understood), fingerprint
        ("" for a source), classes (names by label), splits (of each: images,
        boxes, and of shards shards and bytes), statistics (of each split; see
        `trainer.data.statistics`), problems (counts by reason) and examples (texts by reason).
        Of raw images and sources the boxes are counted that cleaning would keep.

    Raises:
        DataError: it is missing, empty or not of its format.
        StorageError: it cannot be reached.
    """
    view = open_view(text, boxes_from, allow_hosts)
    if isinstance(view, Shards):
        return _describe_shards(view)
    per_split = {split: _describe(view, split) for split in view.splits}
    problems = view.problems()
    for _, wrong in per_split.values():
        problems.merge(wrong.to_json())
    described = {split: description for split, (description, _) in per_split.items()}
    return {
        "kind": view.kind,
        "uri": view.uri,
        "read_as": view.read_as if isinstance(view, SourceRows) else "",
        "fingerprint": view.manifest["fingerprint"] if isinstance(view, RawImages) else "",
        "classes": view.names,
        "splits": {
            split: {"images": description["images"], "boxes": sum(description["boxes_of_class"])}
            for split, description in described.items()
        },
        "statistics": described,
        "problems": dict(sorted(problems.counts.items())),
        "examples": problems.examples,
    }


def check(report: dict[str, Any], config: DataConfig) -> None:
    """Refuse a source that could not be downloaded and sharded, without fetching its images.

    Args:
        report: what `inspect` returned; nothing is said against shards and raw images.
        config: max_bad_fraction is used.

    Raises:
        DataError: too many images or boxes are bad, or there are none to train on.
    """
    if report["kind"] != SourceRows.kind:
        return
    problems = Problems(report["problems"], report["examples"])
    images = sum(split["images"] for split in report["splits"].values())
    boxes = sum(split["boxes"] for split in report["splits"].values())
    problems.check(
        report["uri"],
        images=images + problems.total(reasons.BAD_IMAGES),
        boxes=boxes + problems.total(reasons.BAD_BOXES),
        max_bad_fraction=config.max_bad_fraction,
    )
    train = report["splits"].get("train", {"images": 0, "boxes": 0})
    for noun in ("images", "boxes"):
        if not train[noun]:
            raise DataError(f"{report['uri']}: no {noun} to train on", fix="look at its annotations")


def _describe_shards(view: Shards) -> dict[str, Any]:
    index = view.index
    left_out = [f"{item['file_name']}: {item['reason']}" for item in index["quarantined"]]
    absent = view.absent()
    return {
        "kind": view.kind,
        "uri": view.uri,
        "read_as": "",
        "fingerprint": index["fingerprint"],
        "classes": view.names,
        "splits": {
            split: {
                "images": part["samples"],
                "boxes": part["boxes"],
                "shards": len(part["shards"]),
                "bytes": sum(shard["bytes"] for shard in part["shards"]),
            }
            for split, part in index["splits"].items()
        },
        "statistics": index["statistics"],
        "problems": index["problems"] | dict(sorted(absent.counts.items())),
        "examples": ({reasons.IMAGE_UNREADABLE: left_out[: reasons.EXAMPLES]} if left_out else {})
        | absent.examples,
    }


def _describe(view: RawImages | SourceRows, split: str) -> tuple[dict[str, Any], Problems]:
    """Count the rows of a split, a block at a time."""
    labels = len(view.names)
    total = statistics.describe([], labels)
    problems = Problems()
    count = view.manifest["splits"][split]["images"] if isinstance(view, RawImages) else None
    with log.progress(f"inspect {split}", count, "images") as bar:
        for rows in view.blocks(split):
            sound = [row for row in rows if not row["fault_reason"]]
            for row in rows:
                if row["fault_reason"]:
                    problems.add(row["fault_reason"], f"{row['file_name']}: {row['fault_detail']}")
            sized = [row for row in sound if is_sized(row)]
            others = [row for row in sound if not is_sized(row)]
            total = statistics.add(
                total, statistics.describe(cleaned_samples(sized, labels, problems), labels)
            )
            unsized = statistics.describe(cleaned_samples(others, labels, problems), labels)
            for name in _OF_PIXELS:
                unsized[name] = [0] * len(unsized[name])
            total = statistics.add(total, unsized)
            bar.update(len(rows))
    return total, problems


def is_sized(row: dict[str, Any]) -> bool:
    """Whether a row tells how large its image is, in pixels."""
    size = (row["width"], row["height"])
    return 0 not in size and size not in (SHARES, SHARES_UPRIGHT)


def cleaned_samples(rows: list[dict[str, Any]], labels: int, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yield rows as samples with the boxes that cleaning keeps; unknown sizes are replaced by a large one."""
    for row in rows:
        width, height, unit = row["width"], row["height"], 1
        if (width, height) in (SHARES, SHARES_UPRIGHT):
            width, height, unit = _STAND_IN, _STAND_IN, _STAND_IN
        elif 0 in (width, height):
            width = height = 2**31
        boxes = [
            {"category_id": box["category"], "bbox": [unit * box[axis] for axis in "xywh"], "area": 0.0,
             "iscrowd": box["iscrowd"]}
            for box in row["boxes"]
        ]  # fmt: skip
        kept = clean(boxes, width, height, labels, problems, row["file_name"])
        yield {"width": width, "height": height, "annotations": kept}
