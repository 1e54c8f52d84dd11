"""Synthetic images that the program draws: a detection set of five shapes, from a seed.

Scene n is a function of seed, size and n alone, so scenes are drawn in any order by any number of
processes, and a killed download goes on where it was.
"""

import hashlib
import io
from dataclasses import asdict, dataclass

from trainer.base.bounded_text import whole_number
from trainer.base.errors import DataError
from trainer.data.sources.row_format import Entries
from trainer.data.sources.sample_scenes import CLASSES, layout, render
from trainer.data.sources.source import Box, Category, Entry, Listing

VERSION = 1
"""Raise it when the same parameters draw other images."""

_LIMITS = {"images": (6, 1_000_000), "seed": (0, 2**31 - 1), "size": (96, 1024)}


@dataclass(frozen=True)
class SampleSource:
    """Drawn images; val and test have a sixth of the training images each."""

    images: int = 480
    seed: int = 0
    size: int = 160
    """Typical side of an image, in pixels."""
    cpu_bound = True
    origins_are_uris = False

    @classmethod
    def parse(cls, text: str) -> "SampleSource":
        """Read "images=300,seed=0,size=160".

        Raises:
            DataError: a parameter does not exist or is out of its range.
        """
        values: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            low, high = _LIMITS.get(name.strip(), (0, -1))
            number = whole_number(value.strip())
            if number is None or not low <= number <= high:
                ranges = ", ".join(f"{key} ({low} to {high})" for key, (low, high) in _LIMITS.items())
                raise DataError(f"source sample: cannot use {part!r}", fix=f"parameters: {ranges}")
            values[name.strip()] = number
        return cls(**values)

    @property
    def uri(self) -> str:
        """Name the source with all its parameters."""
        return "sample:" + ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @property
    def images_uri(self) -> str:
        """Name where the bytes come from."""
        return self.uri

    def listing(self) -> Listing:
        """Lay all scenes out; drawing them is left to `read`."""
        held_out = max(1, self.images // 6)
        splits: dict[str, Entries] = {}
        first = 0
        for split, count in (("train", self.images), ("val", held_out), ("test", held_out)):
            splits[split] = Entries(self._entry(number) for number in range(first, first + count))
            first += count
        return Listing(
            categories=[Category(name, index + 1) for index, name in enumerate(CLASSES)],
            splits=splits,
            state=hashlib.sha256(f"{VERSION} {self.uri}".encode()).hexdigest(),
        )

    def read(self, origin: str) -> bytes:
        """Draw a scene; return it as JPEG."""
        image = render(layout(self.seed, int(origin), self.size))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=92)
        return buffer.getvalue()

    def _entry(self, number: int) -> Entry:
        scene = layout(self.seed, number, self.size)
        boxes = [Box(label, bbox, area, crowd) for label, bbox, area, crowd in scene.objects]
        return Entry(f"scene_{number:06}.jpg", str(number), scene.width, scene.height, boxes)
