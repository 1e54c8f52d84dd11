"""Finds pictures that are in two splits under different names: scores on them are too good.

Pictures are compared by a difference hash of 256 bits: whether each of 16 x 16 cells is brighter than its
left neighbour. Another size or quality of a picture changes some ten bits (BCCD: 26 at most, also without
5 pixels of each side), while different pictures differ in 80 or more.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from trainer.base.os_errors import refuse_want

_CELLS = 16
_CONTRAST = 1
"""Grey levels that a cell must be brighter by: noise in flat areas is not."""

_FEWEST = 8
"""Bits that a hash must have: with less, a picture is too flat to be recognised."""

_MOST, _RELATIVE = 24, 0.25
"""Bits by which near duplicates differ at most, also relative to the bits that are set."""

_BUCKET = 64
"""Pictures that may share a part of the hash: a part that more have says nothing."""

WORDS = 4
"""64-bit words of a hash."""

NO_HASH = bytes(8 * WORDS)


class Pair(NamedTuple):
    """Two pictures that look the same."""

    split: str
    row: int
    other_split: str
    other_row: int
    distance: int
    """Bits in which their hashes differ."""


def picture_hash(jpeg: bytes) -> bytes:
    """Return the hash of a JPEG, 32 bytes; all zero if it is damaged or flat.

    It is decoded at a fraction of its size: 0.6 ms for 640 x 480 pixels.
    """
    try:
        grey = simplejpeg.decode_jpeg(
            jpeg, "GRAY", fastdct=True, fastupsample=True, min_height=2 * _CELLS, min_width=2 * _CELLS,
        )  # fmt: skip
    except (ValueError, MemoryError) as error:
        refuse_want(error, "an image")
        return NO_HASH
    cells = Image.fromarray(grey[..., 0]).resize((_CELLS + 1, _CELLS), Image.Resampling.BOX)
    levels = np.asarray(cells).astype(np.int16)
    bits = levels[:, 1:] > levels[:, :-1] + _CONTRAST
    # Transposed, so that the parts of a hash come from columns: rows of a sky are alike.
    return np.packbits(bits.T).tobytes() if bits.sum() >= _FEWEST else NO_HASH


def hashes_of(data: bytes) -> np.ndarray:
    """Return hashes one after the other as an array, uint64 [N, WORDS]."""
    return np.frombuffer(data, np.uint64).reshape(-1, WORDS)


def find(hashes: Mapping[str, np.ndarray]) -> list[Pair]:
    """Return the near duplicates across splits, the most alike first.

    Each picture of a split comes with the most similar one of the splits before it. Two pictures are compared
    if one of 16 parts of their hashes is the same, which is certain up to 15 bits, and 97 % likely for 24.

    Args:
        hashes: of each split, as `hashes_of` returns them; zeros are left out.
    """
    pairs: list[Pair] = []
    splits = list(hashes)
    for number, split in enumerate(splits):
        best: dict[int, Pair] = {}
        for other in splits[:number]:
            for row, other_row, distance in zip(*_alike(hashes[split], hashes[other]), strict=True):
                if row not in best or distance < best[row].distance:
                    best[row] = Pair(split, row, other, other_row, distance)
        pairs += best.values()
    return sorted(pairs, key=lambda pair: (pair.distance, pair))


def _alike(ones: np.ndarray, others: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of near duplicates in both arrays, and their distances."""
    one_rows, other_rows = (np.flatnonzero(words.any(axis=1)) for words in (ones, others))
    if not len(one_rows) or not len(other_rows):
        return [], [], []
    one_parts, other_parts = ones[one_rows].view(np.uint16), others[other_rows].view(np.uint16)
    found = [np.zeros((2, 0), np.int64)]
    for part in range(one_parts.shape[1]):
        order = np.argsort(other_parts[:, part], kind="stable")
        values = other_parts[order, part]
        first = np.searchsorted(values, one_parts[:, part], "left")
        count = np.searchsorted(values, one_parts[:, part], "right") - first
        count[count > _BUCKET] = 0
        row = np.repeat(np.arange(len(count)), count)
        step = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        candidates = np.stack([one_rows[row], other_rows[order[first[row] + step]]])
        pair = ones[candidates[0]], others[candidates[1]]
        distance = np.bitwise_count(pair[0] ^ pair[1]).sum(axis=1)
        fewest = np.minimum(*(np.bitwise_count(words).sum(axis=1) for words in pair))
        found.append(candidates[:, distance <= np.minimum(_MOST, _RELATIVE * fewest)])
    rows, others_of_rows = np.unique(np.concatenate(found, axis=1), axis=1)
    distances = np.bitwise_count(ones[rows] ^ others[others_of_rows]).sum(axis=1)
    return rows.tolist(), others_of_rows.tolist(), distances.tolist()
