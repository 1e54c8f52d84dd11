"""Detections of a whole split, shared over the processes, every image once."""

from typing import Any

import torch

from trainer import log
from trainer.config import Config
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardDataset
from trainer.distributed import World, gather
from trainer.model.detector import Detector
from trainer.model.postprocess import Detections
from trainer.precision import autocast


def predict_split(
    detector: Detector, dataset: ShardDataset, config: Config, world: World, *, task: str = "evaluate"
) -> list[dict[str, Any]]:
    """Detect objects in all images of a split.

    Args:
        detector: in evaluation mode, on the world's device.
        dataset: the split.
        config: image size, batch size, precision.
        world: the processes that share the images.
        task: name for the progress display.

    Returns:
        On every rank, all detections in COCO form: image_id, category_id (contiguous label),
        bbox [x, y, w, h] in pixels of the stored image, score. In order of image id.
    """
    loader = EvalLoader(dataset, config.loader, batch_size=config.evaluation.batch_size, world=world)
    sizes = {int(image_id): size for image_id, size in zip(dataset.image_ids, dataset.sizes, strict=True)}
    found: list[dict[str, Any]] = []
    with torch.inference_mode(), log.progress(task, len(dataset), "images", shown=world.is_main) as bar:
        for batch in loader:
            with autocast(world.device, config.evaluation.precision):
                detections = detector.predict(batch.images)
            found += to_coco(detections, batch.image_ids, batch.scales, sizes)
            bar.update(min(len(batch.image_ids) * world.size, len(dataset) - bar.done))
    everywhere = [item for part in gather(found, world) for item in part]
    return sorted(everywhere, key=lambda item: item["image_id"])


def to_coco(
    detections: Detections, image_ids: list[int], scales: list[float], sizes: dict[int, Any]
) -> list[dict[str, Any]]:
    """Write a batch of detections as COCO results, in pixels of the stored images.

    Args:
        detections: boxes in pixels of the network's square.
        image_ids: [B] ids.
        scales: [B] pixels of the square for one of the image.
        sizes: width and height of each image, by id.
    """
    boxes, scores, labels, num = (part.cpu() for part in detections)
    results = []
    for row, (image_id, scale) in enumerate(zip(image_ids, scales, strict=True)):
        width, height = (int(side) for side in sizes[image_id])
        count = int(num[row])
        corners = boxes[row, :count].double() / scale
        corners[:, 0::2].clamp_(0, width)
        corners[:, 1::2].clamp_(0, height)
        corners[:, 2:] -= corners[:, :2]
        for box, score, label in zip(
            corners.tolist(), scores[row, :count].tolist(), labels[row, :count].tolist(), strict=True
        ):
            results.append({"image_id": image_id, "category_id": label, "bbox": box, "score": score})
    return results
