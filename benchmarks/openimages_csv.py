"""CPU time to read Open Images' boxes, measured on some and told for all of the training split.

    python -m benchmarks.openimages_csv
    python -m benchmarks.openimages_csv --boxes 14610229 --rounds 1

A CSV in the form of the training split (21 columns, 8.4 boxes an image) is written and read block by
block, as `openimages:` reads it. The ratio is how many times as fast as the goal that is.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.common import arguments, report
from trainer.data.problem_counts import Problems
from trainer.data.sources import openimages
from trainer.data.sources.openimages import Meaning
from trainer.data.sources.source import Category

GOAL = 15
TRAIN_BOXES = 14_610_229

_HEADER = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,"
)
_CLICKS = "IsInside,XClick1X,XClick2X,XClick3X,XClick4X,XClick1Y,XClick2Y,XClick3Y,XClick4Y\n"


def write(path: Path, boxes: int, classes: int) -> None:
    """Write that many boxes of random images, classes and places."""
    random = np.random.default_rng(0)
    clicks = "0,1,0,0,0,0.148438,0.012500,0.059375,0.195312,0.148438,0.357812,0.587500,0.325000\n"
    with path.open("w") as file:
        file.write(_HEADER + _CLICKS)
        image, remaining = 0, boxes
        while remaining:
            image, count = image + 1, min(remaining, int(random.geometric(1 / 8.4)))
            remaining -= count
            for x0, x1, y0, y1 in random.random((count, 4)).tolist():
                mid = f"/m/{int(x0 * classes):05}"
                file.write(f"{image:016x},xclick,{mid},1,{x0:.6f},{x1:.6f},{y0:.6f},{y1:.6f},{clicks}")


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__, boxes=1_000_000)
    openimages._SORT_BYTES = 0  # the whole file is larger than what is sorted in memory
    categories = [Category(f"class {number}", f"/m/{number:05}") for number in range(601)]
    meaning = Meaning(categories, categories, {})
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "boxes.csv"
        write(path, options.boxes, len(categories))
        for _ in range(options.rounds):
            began = time.process_time()
            batches = openimages.read_boxes(
                str(path), "s3://images", categories, meaning, meaning, None, "", "", Problems()
            )
            boxes_read = sum(len(batch["boxes"].flatten()) for batch in batches)
            times.append((time.process_time() - began) * TRAIN_BOXES / options.boxes)
            if boxes_read != options.boxes:
                raise SystemExit(f"error: {boxes_read} boxes were read, not {options.boxes}")
    figures = {
        "boxes": options.boxes,
        "cpu_s_of_train": statistics.median(times),
        "load_after": os.getloadavg()[0],
    }
    ratio = GOAL / statistics.median(times)
    report("openimages_csv", ratio, figures, options, at_most={"cpu_s_of_train": GOAL})


if __name__ == "__main__":
    main()
