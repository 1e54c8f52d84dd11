"""Detects objects in the images of a split, in whole images or tile by tile."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_iou

from trainer.base import log
from trainer.base.os_errors import raise_if_exhausted
from trainer.config.schema import Config
from trainer.config.types import NetworkInput
from trainer.data.batch import Batch
from trainer.data.loader import EvalLoader
from trainer.data.shard_index import ShardDataset
from trainer.data.tiles import Window
from trainer.data.transforms import Scales
from trainer.evaluation.truth_and_predictions import Predictions
from trainer.launching.distributed import World, gather_on_main
from trainer.model.architecture import Detections

_MIN_IOU = 0.5
_MIN_SIDE = 0.01  # pixels of the image; detections in the padding are clipped to a line
_CUT_MARGIN = 0.01  # a side this near to a tile border counts as cut; relative to the tile
PredictionsAndWindows = tuple[Predictions, np.ndarray]  # detections [N] and their windows [N, 4]


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its origin."""

    uri: str
    predict: Callable[[Tensor], Detections]  # detections in uint8 squares [B, 3, S, S]
    reentrant: bool  # whether several threads may call it at once
    categories: list[dict[str, Any]]  # classes in the order of its labels
    network_input: NetworkInput
    sha256: str
    step: int | None  # optimizer steps of its training
    config: Mapping[str, Any]  # configuration of its training
    title: str  # its name and version
    kind: str  # its format in export.formats, "weights" or "checkpoint"
    runtime: str  # the library that runs it and its version
    metadata: Any = None  # the `bundle.Metadata` of an exported model


def predict_split(
    predict: Callable[[Tensor], Detections],
    dataset: ShardDataset,
    config: Config,
    world: World,
    *,
    task: str = "evaluate",
    tile: tuple[int, float] = (0, 0.0),
) -> Predictions:
    """Detect objects in all images of a split, shared among the processes of `world`; see `predict_share`.

    Returns:
        All predictions on rank 0; on other ranks, the predictions of the rank's images.
    """
    share = predict_share(predict, dataset, config, world, task=task, tile=tile)
    gathered = gather_on_main(share, world)
    return Predictions.join(gathered) if world.is_main else share


def predict_share(
    predict: Callable[[Tensor], Detections],
    dataset: ShardDataset,
    config: Config,
    world: World,
    *,
    task: str = "evaluate",
    reentrant: bool = True,
    tile: tuple[int, float] = (0, 0.0),
) -> Predictions:
    """Detect objects in the images of this process, without communication.

    `predict` is the method of a detector or LoadedModel on the world's device; `reentrant` says whether
    several threads may call it at once. `task` is the name in the progress display. `tile` is the side and
    overlap of the tiles into which images are split; side 0 means whole images.

    Returns:
        Predictions by image id, with boxes in pixels of the stored image.
    """
    is_parallel = reentrant and world.device.type == "cpu"
    lanes = min(torch.get_num_threads(), config.evaluation.batch_size) if is_parallel else 1
    images = -(-config.evaluation.batch_size // lanes)
    loader = EvalLoader(
        dataset,
        config.loader,
        batch_size=images,
        world=world,
        max_bad_fraction=config.data.max_bad_fraction,
        tile=tile,
    )
    sizes = dict(zip(dataset.image_ids.tolist(), dataset.sizes, strict=True))

    def detect(batch: Batch) -> tuple[int, PredictionsAndWindows]:
        # Inference mode applies only to the current thread.
        try:
            with torch.inference_mode():
                detections = predict(batch.images)
        except RuntimeError as error:
            raise_if_exhausted(error, "the model", "run")
            raise
        found = to_image_boxes(detections, batch.image_ids, batch.scales, sizes, batch.windows)
        return len(batch.image_ids), found

    collected: list[PredictionsAndWindows] = []
    with log.progress(task, loader.picture_count * world.size, "images", shown=world.is_main) as bar:
        for count, found in _detect_in_parallel(detect, loader, lanes):
            collected.append(found)
            bar.update(min(count * world.size, loader.picture_count * world.size - bar.done))
    return join_detections(collected, sizes, tile)


def join_detections(
    parts: Sequence[PredictionsAndWindows], sizes: Mapping[int, np.ndarray], tile: tuple[int, float]
) -> Predictions:
    """Join detections in the order of image ids, and merge those of one object in several tiles.

    `sizes` are width and height of each image by id; for `tile` see `predict_share`.
    """
    found, windows = zip((Predictions.from_coco([]), np.zeros((0, 4), np.int64)), *parts, strict=True)
    joined = Predictions.join(found)
    if not tile[0]:
        return joined
    order = np.argsort(np.concatenate([part.image_ids for part in found]), kind="stable")
    return merge_tiles(joined, np.concatenate(windows)[order], sizes)


def _detect_in_parallel(
    detect: Callable[[Batch], tuple[int, PredictionsAndWindows]], batches: Iterable[Batch], lanes: int
) -> Iterator[tuple[int, PredictionsAndWindows]]:
    if lanes == 1:
        yield from map(detect, batches)
        return
    threads = torch.get_num_threads()
    pending: deque[Future[tuple[int, PredictionsAndWindows]]] = deque()
    pool = ThreadPoolExecutor(
        lanes, thread_name_prefix="detect", initializer=torch.set_num_threads, initargs=(threads // lanes,)
    )
    try:
        for batch in batches:
            pending.append(pool.submit(detect, batch))
            if len(pending) > lanes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        # set_num_threads also changes the default of threads that start later.
        torch.set_num_threads(threads)


def to_image_boxes(
    detections: Detections,
    image_ids: list[int],
    scales: Sequence[Scales],
    sizes: Mapping[int, np.ndarray],
    windows: Sequence[Window] = (),
) -> PredictionsAndWindows:
    """Convert a batch of detections from pixels of the network's square to pixels of the stored images.

    Boxes are clipped to their image, and dropped if no area remains. `scales` are the `View.scales` of the
    images, `sizes` their width and height by id, and `windows` the parts of the images that the squares show;
    without `windows`, each square shows a whole image.
    """
    boxes, scores, labels, num = (part.cpu().numpy() for part in detections)
    rows = np.repeat(np.arange(len(image_ids)), num)
    slots = np.concatenate([np.arange(count) for count in num]) if len(num) else num
    corners = boxes[rows, slots].astype(np.float64) / np.array(scales, np.float64).reshape(-1, 4)[rows]
    shown = np.array(windows or [(0, 0, 0, 0)] * len(image_ids), np.int64).reshape(-1, 4)[rows]
    corners += np.tile(shown[:, :2], 2)
    limits = np.array([sizes[image_id] for image_id in image_ids], np.float64).reshape(-1, 2)[rows]
    corners = np.clip(corners, 0, np.concatenate([limits, limits], axis=1))
    corners[:, 2:] -= corners[:, :2]
    predictions = Predictions(
        np.asarray(image_ids, np.int64)[rows],
        labels[rows, slots].astype(np.int64),
        corners,
        scores[rows, slots].astype(np.float64),
    )
    inside = (corners[:, 2:] >= _MIN_SIDE).all(axis=1)
    return predictions.take(inside), shown[inside]


def merge_tiles(
    predictions: Predictions, windows: np.ndarray, sizes: Mapping[int, np.ndarray]
) -> Predictions:
    """Merge detections of the same object in neighboring tiles.

    Two tiles show the same pixels in the region that they share. Therefore, two detections of a class belong
    to one object if the parts of their boxes in that region overlap by at least half (IoU), whether or not a
    tile border cuts the object. The merged box is that of a detection that no border cuts; if there is none,
    it encloses all detections of the object. The score is the highest one. Detections of one tile are never
    merged with each other.

    `windows` [N, 4] are left, top, width and height of each detection's tile, in pixels of the image; `sizes`
    are width and height of each image by id. The remaining detections keep their order.
    """
    boxes = np.concatenate([predictions.boxes[:, :2], predictions.boxes[:, :2] + predictions.boxes[:, 2:]], 1)
    tiles = np.concatenate([windows[:, :2], windows[:, :2] + windows[:, 2:]], axis=1).astype(np.float64)
    scores, kept = predictions.scores.copy(), np.ones(len(boxes), bool)
    order = np.argsort(predictions.image_ids, kind="stable")
    ends = np.flatnonzero(np.diff(predictions.image_ids[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        size = sizes[int(predictions.image_ids[rows[0]])]
        cut = _is_cut(boxes[rows], tiles[rows], size)
        own_boxes, own_scores = boxes[rows], scores[rows]
        kept[rows] = _merge(own_boxes, own_scores, predictions.labels[rows], tiles[rows], cut)
        boxes[rows], scores[rows] = own_boxes, own_scores
    boxes[:, 2:] -= boxes[:, :2]
    return Predictions(predictions.image_ids, predictions.labels, boxes, scores).take(kept)


def _is_cut(boxes: np.ndarray, tiles: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return whether each box [N, 4] touches a border of its tile that is not a border of the image."""
    near = _CUT_MARGIN * (tiles[:, 2:] - tiles[:, :2])
    low = (boxes[:, :2] <= tiles[:, :2] + near) & (tiles[:, :2] > 0)
    high = (boxes[:, 2:] >= tiles[:, 2:] - near) & (tiles[:, 2:] < size)
    return np.asarray((low | high).any(axis=1))


def _merge(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, tiles: np.ndarray, cut: np.ndarray
) -> np.ndarray:
    """Merge the detections of one image in place; return which of them remain, bool [N]."""
    distinct, tile = np.unique(tiles, axis=0, return_inverse=True)
    pairs = _find_partners(boxes, labels, distinct, tile.reshape(-1))
    kept = np.ones(len(boxes), bool)
    leader: dict[int, int] = {}
    tiles_of: dict[int, set[int]] = {}
    # Uncut boxes first, then by score; only boxes with a partner.
    for row in sorted(pairs, key=lambda row: (cut[row], -scores[row], row)):
        number = int(tile[row])
        leaders = (leader[other] for _, other in sorted(pairs[row], reverse=True) if other in leader)
        first = next((leading for leading in leaders if number not in tiles_of[leading]), row)
        leader[row] = first
        tiles_of.setdefault(first, set()).add(number)
        if first != row:
            kept[row] = False
            scores[first] = max(scores[first], scores[row])
            if cut[first]:
                boxes[first, :2] = np.minimum(boxes[first, :2], boxes[row, :2])
                boxes[first, 2:] = np.maximum(boxes[first, 2:], boxes[row, 2:])
    return kept


def _find_partners(
    boxes: np.ndarray, labels: np.ndarray, tiles: np.ndarray, tile: np.ndarray
) -> dict[int, list[tuple[float, int]]]:
    """Return for each row the overlaps and rows of its partners in other tiles."""
    pairs: dict[int, list[tuple[float, int]]] = defaultdict(list)
    rows_of = [np.flatnonzero(tile == number) for number in range(len(tiles))]
    for one, rows in enumerate(rows_of):
        for other in range(one + 1, len(tiles)):
            low = np.maximum(tiles[one, :2], tiles[other, :2])
            high = np.minimum(tiles[one, 2:], tiles[other, 2:])
            if not (high > low).all():
                continue
            region = np.concatenate([low, high])
            first, second = (_select_overlapping(boxes, part, region) for part in (rows, rows_of[other]))
            parts = (torch.from_numpy(_clip(boxes[part], region)) for part in (first, second))
            overlap = box_iou(*parts).numpy()
            same = labels[first][:, None] == labels[second]
            for i, j in np.argwhere((overlap >= _MIN_IOU) & same).tolist():
                pairs[int(first[i])].append((float(overlap[i, j]), int(second[j])))
                pairs[int(second[j])].append((float(overlap[i, j]), int(first[i])))
    return pairs


def _clip(boxes: np.ndarray, region: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(boxes, np.tile(region[:2], 2), np.tile(region[2:], 2)))


def _select_overlapping(boxes: np.ndarray, rows: np.ndarray, region: np.ndarray) -> np.ndarray:
    clipped = _clip(boxes[rows], region)
    return np.asarray(rows[((clipped[:, 2:] - clipped[:, :2]) > 0).all(axis=1)])
