"""How often training reads each image of a set with rare classes."""

import numpy as np

from trainer.base.errors import DataError
from trainer.config.schema import LoaderConfig
from trainer.data.shard_index import ShardDataset
from trainer.launching.distributed import World, broadcast

_LOOKED_AT = 64
"""Images that are enough to see what a source tells."""


def image_weights(dataset: ShardDataset, config: LoaderConfig) -> np.ndarray | None:
    """Return how often each sample is read in relation to others; None where all are read alike.

    Args:
        dataset: the training split, whose annotations are read.
        config: sampling and its threshold.

    Raises:
        StorageError: they cannot be read.
    """
    if config.sampling == "plain":
        return None
    images, labels = dataset.classes()
    if config.sampling == "repeat_factor":
        return repeat_factors(images, labels, len(dataset), config.repeat_threshold)
    return class_shares(images, labels, len(dataset))


def shared_weights(dataset: ShardDataset, config: LoaderConfig, world: World) -> np.ndarray | None:
    """Return `image_weights` in every process: rank 0 reads the annotations for all.

    Raises:
        StorageError: they cannot be read.
    """
    if config.sampling == "plain":
        return None
    weights: np.ndarray | None = broadcast(image_weights(dataset, config) if world.is_main else None, world)
    return weights


def check_verified(dataset: ShardDataset) -> None:
    """Check that images tell which classes people looked for in them, by a few of them.

    Raises:
        DataError: none does.
        StorageError: they cannot be read.
    """
    few = np.unique(np.linspace(0, len(dataset) - 1, _LOOKED_AT).astype(int)).tolist()
    if not any("verified" in dataset.read(index)[1].get("extra", {}) for index in few):
        raise DataError(
            f"train.negatives=verified: of {len(few)} images in {dataset.uri} none says which classes were "
            "looked for in it",
            fix="take a source that does (openimages:labels=all), or set train.negatives=all",
        )


def repeat_factors(images: np.ndarray, labels: np.ndarray, samples: int, threshold: float) -> np.ndarray:
    """Repeat factors of images by their rarest class (Gupta, Dollar, Girshick 2019, arXiv:1908.03195).

    A class c in a share f(c) of the images has r(c) = max(1, sqrt(threshold / f(c))); an image has the
    largest r of its classes, and 1 where it has none.

    Args:
        images: index of an image, int64 [K], ...
        labels: ... and a class that it has, int64 [K]; each pair once.
        samples: images there are.
        threshold: share below which a class is rare; LVIS takes 0.001.

    Returns:
        fp64 [samples].
    """
    factors = np.ones(samples)
    if len(labels):
        share = np.bincount(labels) / samples
        of_class = np.maximum(1.0, np.sqrt(threshold / np.where(share > 0, share, 1.0)))
        np.maximum.at(factors, images, of_class[labels])
    return factors


def class_shares(images: np.ndarray, labels: np.ndarray, samples: int) -> np.ndarray:
    """Weights by which every class is drawn alike (class-aware sampling, Shen et al. 2016, arXiv:1512.05830).

    An image has 1 / n(c) of each class c that it has, where n(c) images have it; those without any count
    as one class more.

    Args:
        images: see `repeat_factors`.
        labels: see `repeat_factors`.
        samples: images there are.

    Returns:
        fp64 [samples].
    """
    weights = np.zeros(samples)
    if len(labels):
        np.add.at(weights, images, 1.0 / np.bincount(labels)[labels])
    empty = weights == 0
    if empty.any():
        weights[empty] = 1.0 / empty.sum()
    return weights
