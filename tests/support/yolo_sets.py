"""What tests see of a YOLO data set."""

from pathlib import Path

from source_rows import entries_of

from trainer.data import sources
from trainer.data.sources.yolo import YoloSource

ONE = "0 0.5 0.5 0.25 0.5\n"


def names(root: Path | str) -> dict[str, list[str]]:
    """File names of each split."""
    listing = sources.parse(f"yolo:{root}").listing()
    return {split: [entry.file_name for entry in entries_of(rows)] for split, rows in listing.splits.items()}


def entries(root: Path | str, split: str = "train") -> list:
    return entries_of(YoloSource(str(root)).listing().splits[split])
