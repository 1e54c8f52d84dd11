"""The content of an evaluation's report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.evaluation.analysis import Calibration, Confusion, OperatingPoint
from trainer.evaluation.gate import Verdict
from trainer.evaluation.metrics import Change
from trainer.report.gallery import GalleryImage

Table = Sequence[Sequence[str]]
"""Rows of cells, the first of which is their header."""


@dataclass(frozen=True)
class Compared:
    """The baseline a model was compared with, and the changes against it."""

    name: str
    """The baseline."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Of coco/AP, coco/AP50 and AP[class], from scoring.changes."""
    samples: int = 0
    """Bootstrap samples behind the intervals."""
    obstacle: str = ""
    """Why there is no comparison."""


@dataclass(frozen=True)
class ReportData:
    """Everything the report shows. Only the first five are needed."""

    title: str
    """Name of the run or model."""
    split: str
    """Split that was scored."""
    images: int
    """Images in it."""
    metrics: Mapping[str, float]
    """The twelve COCO numbers by name, as in CocoResult, and others."""
    per_class: Mapping[str, Mapping[str, float]]
    """AP, AP50, sizes and boxes by class, as in CocoResult."""
    precision: np.ndarray | None = None
    """[T, R, K] as in CocoResult, for the curves."""
    verdict: Verdict | None = None
    """The gate's decision."""
    compared: Compared | None = None
    """The comparison with the baseline."""
    points: Mapping[str, OperatingPoint] = field(default_factory=dict)
    """Threshold of the best F1 by class."""
    f1: Mapping[str, np.ndarray] = field(default_factory=dict)
    """F1 curves by class, from analysis.f1_curves."""
    tide: Mapping[str, tuple[float, int]] | None = None
    """Cost and count by kind of error, from analysis.tide."""
    confusion: Confusion | None = None
    """From analysis.confusion."""
    calibration: Calibration | None = None
    """From analysis.calibration."""
    training: Sequence[dict[str, Any]] = ()
    """Rows of metrics.jsonl."""
    gallery: Sequence[GalleryImage] | None = None
    """From gallery.worst_images; None leaves the gallery out."""
    load_image: Callable[[int], bytes] | None = None
    """Bytes of an encoded image by its id; needed where there is a gallery."""
    dataset: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of each split, e.g. {"train": {"images": 205, "boxes": 2600}}."""
    warnings: Sequence[str] = ()
    """What is suspicious about the data."""
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Histograms of each split, as in the shards' index."""
    trained_boxes: Mapping[str, int] = field(default_factory=dict)
    """Training boxes of each class."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration, nested or flat."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Libraries, code, data fingerprint and checkpoint, by name."""
    used: Table = ()
    """What the run has used so far: a header, a row a step, and one of all."""
