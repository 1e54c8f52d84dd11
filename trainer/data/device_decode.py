"""Experimental: training images decoded and drawn by the GPU (`loader.decoder=gpu`), by nvJPEG.

It has not been run on a GPU yet. It pays if the host has too few cores for its GPUs. nvJPEG's pixels differ
from libjpeg's by rounding, so evaluation always uses the CPU decoder.
"""

import threading
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from trainer.base.errors import ConfigError, DataError, first_line, install_extra
from trainer.base.os_errors import check_resources
from trainer.data.augmentation import Composition
from trainer.data.decoding import Decoder
from trainer.data.samples import Sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import View


class DeviceDecoder(Decoder):
    """Draws squares on a device, on a separate stream. Any damaged image is an error."""

    def __init__(self, dataset: ShardDataset, device: torch.device) -> None:
        """Prepare; see `check`."""
        check(device)
        super().__init__(dataset, 0.0)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._drawing = threading.Lock()

    def squares(self, count: int, size: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty((count, size, size, 3), dtype=torch.uint8, device=self._device)

    def draw(
        self, indices: Sequence[int], samples: Sequence[Sample], views: Sequence[View], squares: Tensor
    ) -> list[bool]:
        with self._drawing, torch.cuda.stream(self._stream):
            size = squares.shape[1]
            for sample, view, square in zip(samples, views, squares, strict=True):
                square.copy_(draw_view(self._decode(sample), view, size, size))
            self._wait()
        return [True] * len(indices)

    def compose(
        self, samples: Sequence[Sequence[Sample]], picture: Composition, square: Tensor
    ) -> list[list[bool]]:
        with self._drawing, torch.cuda.stream(self._stream):
            for number, (tiles, layer_samples) in enumerate(zip(picture.layers, samples, strict=True)):
                layer = torch.empty_like(square) if number else square
                for tile, sample in zip(tiles, layer_samples, strict=True):
                    left, top, width, height = tile.area
                    drawn = draw_view(self._decode(sample), tile.view, width, height)
                    layer[top : top + height, left : left + width] = drawn
                if number:
                    mean = square.int() * picture.share + layer.int() * (256 - picture.share) + 128
                    square.copy_(mean >> 8)
            self._wait()
        return [[True] * len(tiles) for tiles in picture.layers]

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _decode(self, sample: Sample) -> Tensor:
        """Return an image, uint8 [3, H, W], at its stored size."""
        jpeg, record = sample
        try:
            image = decode(jpeg, self._device)
            height, width = image.shape[1:]
            reason = f"it is of {width}x{height} pixels, not {record['width']}x{record['height']}"
            if (height, width) == (record["height"], record["width"]):
                return image
        except RuntimeError as error:
            check_resources(error, record["file_name"])
            reason = first_line(error)
        where = f"image {record['file_name']} in the shards at {self._dataset.uri}"
        repair = "run `kubedet data verify --repair` on that folder"
        fix = f"set loader.decoder=cpu, which tolerates damaged images, or {repair}"
        raise DataError(f"{where} cannot be decoded: {reason}", fix=fix)


def check(device: torch.device) -> None:
    """Refuse a device that cannot decode."""
    if device.type != "cuda":
        fix = "set loader.decoder=cpu"
        raise ConfigError("loader.decoder=gpu needs an NVIDIA GPU, but this process has none", fix=fix)
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        problem = f"loader.decoder=gpu needs the package torchcodec, 0.16 or newer: {first_line(error)}"
        fix = f"{install_extra('gpu')}, or set loader.decoder=cpu"
        raise ConfigError(problem, fix=fix) from None


def decode(jpeg: bytes, device: torch.device) -> Tensor:
    """Decode a JPEG on a device to uint8 RGB [3, H, W]; damage is a RuntimeError."""
    from torchcodec.decoders import decode_jpeg

    (image,) = decode_jpeg([jpeg], mode="RGB", device=device)
    return image


def draw_view(image: Tensor, view: View, canvas_width: int, canvas_height: int) -> Tensor:
    """Draw the view of uint8 [3, H, W], of the stored size, as `transforms.render` does on the host."""
    canvas = torch.full((canvas_height, canvas_width, 3), view.fill, dtype=torch.uint8, device=image.device)
    left, top, width, height = view.crop
    x, y, place_width, place_height = view.place
    if view.divisor > 1:
        means = F.avg_pool2d(image[None].float(), view.divisor, ceil_mode=True, count_include_pad=False)
        image = means[0].round_().to(torch.uint8)
    cropped = image[:, top : top + height, left : left + width]
    if (height, width) != (place_height, place_width):
        cropped = tv.resize(cropped, [place_height, place_width], antialias=True)
    if view.flip:
        cropped, x = cropped.flip(-1), canvas_width - x - place_width
    if view.flip_vertical:
        cropped, y = cropped.flip(-2), canvas_height - y - place_height
    canvas[y : y + place_height, x : x + place_width] = cropped.permute(1, 2, 0)
    return canvas
