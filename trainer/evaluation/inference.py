"""Detections of a whole split, shared over the processes, every image once."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer import log
from trainer.config import Config
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardDataset
from trainer.distributed import World, gather
from trainer.evaluation.tables import Predictions
from trainer.model.postprocess import Detections
from trainer.precision import autocast


class Predictor(Protocol):
    """A detector, or what runs an exported one."""

    @property
    def predict(self) -> Callable[[Tensor], Detections]:
        """Detections in uint8 squares [B, 3, S, S]."""
        ...


def predict_split(
    detector: Predictor, dataset: ShardDataset, config: Config, world: World, *, task: str = "evaluate"
) -> Predictions:
    """Detect objects in all images of a split.

    Args:
        detector: in evaluation mode, on the world's device.
        dataset: the split.
        config: image size, batch size, precision.
        world: the processes that share the images.
        task: name for the progress display.

    Returns:
        On every rank, all predictions, in order of image id: labels are contiguous from 0,
        boxes in pixels of the stored image.
    """
    loader = EvalLoader(dataset, config.loader, batch_size=config.evaluation.batch_size, world=world)
    sizes = dict(zip(dataset.image_ids.tolist(), dataset.sizes, strict=True))
    found = [Predictions.from_coco([])]
    with torch.inference_mode(), log.progress(task, len(dataset), "images", shown=world.is_main) as bar:
        for batch in loader:
            with autocast(world.device, config.evaluation.precision):
                detections = detector.predict(batch.images)
            found.append(in_images(detections, batch.image_ids, batch.scales, sizes))
            bar.update(min(len(batch.image_ids) * world.size, len(dataset) - bar.done))
    return Predictions.join(gather(Predictions.join(found), world))


def in_images(
    detections: Detections, image_ids: list[int], scales: list[float], sizes: dict[int, np.ndarray]
) -> Predictions:
    """Bring a batch of detections into pixels of the stored images.

    Args:
        detections: boxes in pixels of the network's square.
        image_ids: [B] ids.
        scales: [B] pixels of the square for one of the image.
        sizes: width and height of each image, by id.
    """
    boxes, scores, labels, num = (part.cpu().numpy() for part in detections)
    rows = np.repeat(np.arange(len(image_ids)), num)
    slots = np.concatenate([np.arange(count) for count in num]) if len(num) else num
    corners = boxes[rows, slots].astype(np.float64) / np.asarray(scales, np.float64)[rows, None]
    limits = np.array([sizes[image_id] for image_id in image_ids], np.float64).reshape(-1, 2)[rows]
    corners = np.clip(corners, 0, np.concatenate([limits, limits], axis=1))
    corners[:, 2:] -= corners[:, :2]
    return Predictions(
        np.asarray(image_ids, np.int64)[rows], labels[rows, slots].astype(np.int64), corners,
        scores[rows, slots].astype(np.float64),
    )  # fmt: skip
