"""From the stored bytes of a sample to its pixels, and what becomes of images that are damaged inside.

Sharding looks at headers unless `data.decode_check` is set, so that damage inside an image is found
here, long after. One such image is no reason to end a training of days, and none to hide it: see
`Decoder`.
"""

import logging
import threading
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from trainer.data.shard_index import ShardDataset
from trainer.errors import DataError

_NAMED = 20
_EXAMPLES = 10
_LOG = logging.getLogger("data")


def decode(
    jpeg: bytes, width: int, height: int, divisor: int = 1, *, bgr: bool = False, strict: bool = True
) -> Tensor:
    """Decode a JPEG.

    Args:
        jpeg: its bytes.
        width: of the stored image, pixels.
        height: of the stored image, pixels.
        divisor: 1, 2, 4 or 8: by how much the sides are to be divided, rounded up.
        bgr: give the channels in the reverse order.
        strict: refuse what is damaged inside; without, it is decoded as far as it goes.

    Returns:
        uint8 RGB [3, H, W], of which the channels of a pixel lie side by side.

    Raises:
        ValueError: it is no JPEG of that size, or damaged.
    """
    wanted = (-(-height // divisor), -(-width // divisor))
    least = wanted if divisor > 1 else (0, 0)
    pixels = simplejpeg.decode_jpeg(
        jpeg, colorspace="BGR" if bgr else "RGB", min_height=least[0], min_width=least[1], strict=strict
    )
    if pixels.shape[:2] != wanted:
        raise ValueError(f"it is of {pixels.shape[1]}x{pixels.shape[0]} pixels, not {wanted[1]}x{wanted[0]}")
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_sample(uri: str, data: bytes, record: dict[str, Any]) -> Tensor:
    """Decode a sample of the shards at a URI, see `decode`.

    Raises:
        DataError: naming the image, where that fails.
    """
    try:
        return decode(data, record["width"], record["height"])
    except ValueError as error:
        raise DataError(
            f"image {record['file_name']} in the shards at {uri} cannot be decoded: {error}",
            fix="mend the source, or run the shard step again with data.decode_check=true, which leaves such "
            "images out",
        ) from None


def read_sample(dataset: ShardDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """Read and decode one sample.

    Returns:
        The image as uint8 RGB [3, H, W], and its record (image_id, width, height, annotations).

    Raises:
        DataError: the image is damaged, naming it.
    """
    data, record = dataset.read(index)
    return decode_sample(dataset.uri, data, record), record


class Decoder:
    """Decodes the samples of a split for any number of threads, and counts the damaged ones.

    A damaged image is decoded as far as it goes, as viewers do; one of which nothing can be decoded is
    empty. Either is named in the log when it first comes, and what is made of it depends on nothing but
    its bytes, so that a resumed run sees the same. More than a share of all end the run.
    """

    def __init__(self, dataset: ShardDataset, max_bad_fraction: float) -> None:
        """Begin without any; `max_bad_fraction` is the share of the split that may be damaged."""
        self._dataset, self._max_bad_fraction = dataset, max_bad_fraction
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()

    def decode(
        self, index: int, data: bytes, record: dict[str, Any], divisor: int = 1, *, bgr: bool = False
    ) -> Tensor | None:
        """Decode a sample, see the function of that name.

        Args:
            index: of the sample in its split.
            data: the stored image.
            record: its record.
            divisor: by how much the sides are to be divided.
            bgr: give the channels in the reverse order.

        Returns:
            uint8 RGB [3, H, W]; None where nothing can be decoded.

        Raises:
            DataError: too many images are damaged.
        """
        size = (record["width"], record["height"], divisor)
        try:
            return decode(data, *size, bgr=bgr)
        except ValueError as error:
            reason = str(error)
        try:
            image = decode(data, *size, bgr=bgr, strict=False)
        except ValueError:
            image = None
        self._note(index, record["file_name"], reason, used=image is not None)
        return image

    def _note(self, index: int, name: str, reason: str, *, used: bool) -> None:
        """Log a damaged image the first time, and raise DataError if it is one too many."""
        shard = self._dataset.shards[int(self._dataset.samples["shard"][index])]["name"]
        with self._lock:
            if index in self._damaged:
                return
            self._damaged[index] = f"{name} ({shard}): {reason}"
            found, total = len(self._damaged), len(self._dataset)
            if found > self._max_bad_fraction * total:
                raise self._too_many()
        if found <= _NAMED:
            more = "; more are counted, and `kubedet data verify` names all" if found == _NAMED else ""
            _LOG.warning(
                "damaged image %s in %s: %s; %s (%d of %d so far)%s", name, shard, reason,
                "it is used as far as it can be decoded" if used else "an empty picture takes its place",
                found, total, more,
            )  # fmt: skip

    def _too_many(self) -> DataError:
        shown = "".join(f"\n    {text}" for text in list(self._damaged.values())[:_EXAMPLES])
        return DataError(
            f"{len(self._damaged)} of {len(self._dataset)} images of {self._dataset.split} in the shards at "
            f"{self._dataset.uri} are damaged, more than data.max_bad_fraction {self._max_bad_fraction:g} "
            f"allows; the first ten:{shown}",
            fix="mend the source, or run the shard step again with data.decode_check=true, which leaves such "
            "images out, or let more pass with data.max_bad_fraction",
        )


def empty_targets() -> tuple[np.ndarray, np.ndarray]:
    """Boxes fp32 [0, 4] and labels int64 [0]."""
    return np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
