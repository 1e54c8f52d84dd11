"""Experimental: training images decoded and drawn by the GPU (`loader.decoder=gpu`), by nvJPEG.

It has not been run on a GPU yet. The loader's threads read the bytes and choose the views; another thread
hands a whole batch to the device, on its own stream, and the training's stream waits there until it is drawn.
It pays if the host has too few cores for its GPUs. nvJPEG's pixels differ from libjpeg's by rounding, so
evaluation, whose scores must not depend on the machine, uses the CPU decoder.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from trainer.base.errors import ConfigError, DataError, first_line
from trainer.base.os_errors import check_resources
from trainer.data.augmentation import Composition, Tile
from trainer.data.decoding import Canvas, Decoder, Sample
from trainer.data.shard_index import ShardDataset
from trainer.data.transforms import FILL, View

Drawn = tuple[Tensor, torch.cuda.Event | None]
"""uint8 [B, S, S, 3] on the device, and the event that marks it as complete (None on a CPU)."""


class Slot:
    """An image of a batch that the device will draw: a loader thread fills it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.samples: Sequence[Sequence[Sample]] = []
        """Of every tile of every layer."""
        self.picture = Composition((), 256)

    def __len__(self) -> int:
        """Side of the square, pixels."""
        return self._size


class DeviceCanvas(Canvas):
    """A batch that the device draws when its slots are filled."""

    def __init__(self, decoder: "DeviceDecoder", slots: list[Slot]) -> None:
        self._decoder, self._slots = decoder, slots

    @property
    def squares(self) -> list[Slot]:
        """The slots."""
        return self._slots

    def start(self, tasks: Sequence[Future[Any]]) -> None:
        """Draw the batch once the tasks have filled the slots."""
        self._drawn = self._decoder.submit(tasks, self._slots)

    def take(self) -> Tensor:
        """Return the images, uint8 [B, 3, S, S] in channels_last, for the present stream.

        Raises:
            DataError: naming the image that cannot be decoded.
        """
        images, complete = self._drawn.result()
        if complete is not None:
            stream = torch.cuda.current_stream(images.device)
            stream.wait_event(complete)
            # Its memory belongs to the other stream, which must not reuse it before this one is done.
            images.record_stream(stream)
        return images.permute(0, 3, 1, 2)


class DeviceDecoder(Decoder):
    """Draws batches on a device, in the order in which they are submitted. Any damaged image is an error."""

    def __init__(self, dataset: ShardDataset, device: torch.device) -> None:
        """Prepare.

        Raises:
            ConfigError: there is no GPU, or the package is missing.
        """
        check(device)
        super().__init__(dataset, 0.0)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-device")

    def canvas(self, count: int, size: int) -> DeviceCanvas:
        """Return the slots of a batch; `size` is the side of the squares, pixels."""
        return DeviceCanvas(self, [Slot(size) for _ in range(count)])

    def draw(
        self, indices: Sequence[int], samples: Sequence[Sample], views: Sequence[View], squares: Any
    ) -> list[bool]:
        """Leave some samples to the device; see `Decoder.draw`."""
        for slot, index, sample, view in zip(squares, indices, samples, views, strict=True):
            tile = Tile(index, view, (0, 0, len(slot), len(slot)))
            self.compose([[sample]], Composition(((tile,),), 256), slot)
        return [True] * len(samples)

    def compose(
        self, samples: Sequence[Sequence[Sample]], picture: Composition, square: Any
    ) -> list[list[bool]]:
        """Leave a picture to the device; see `Decoder.compose`."""
        square.samples, square.picture = samples, picture
        return [[True] * len(tiles) for tiles in picture.layers]

    def submit(self, tasks: Sequence[Future[Any]], slots: Sequence[Slot]) -> "Future[Drawn]":
        """Draw a batch once the tasks are done that fill its slots."""
        return self._thread.submit(self._draw_batch, tasks, slots)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _draw_batch(self, tasks: Sequence[Future[Any]], slots: Sequence[Slot]) -> Drawn:
        # Not by `wait`: it does not notice futures that a closing pool cancels.
        for task in tasks:
            task.result()
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
            decoded = iter(
                self._decoded([sample for slot in slots for tiles in slot.samples for sample in tiles])
            )
            images = torch.stack([draw_picture(decoded, slot.picture, len(slot)) for slot in slots])
            if self._stream is None:
                return images, None
            complete = torch.cuda.Event()
            complete.record(self._stream)
            return images, complete

    def _decoded(self, samples: Sequence[Sample]) -> list[Tensor]:
        """All images of a batch, uint8 [3, H, W] each, at their stored sizes."""
        try:
            images = decode([jpeg for jpeg, _ in samples], self._device)
        except RuntimeError:
            # The whole batch fails, and the error does not name the image.
            images = [self._decoded_alone(*sample) for sample in samples]
        for (_, record), image in zip(samples, images, strict=True):
            height, width = image.shape[1:]
            if (height, width) != (record["height"], record["width"]):
                expected = f"{record['width']}x{record['height']}"
                raise self._error(record, f"it is of {width}x{height} pixels, not {expected}")
        return images

    def _decoded_alone(self, jpeg: bytes, record: dict[str, Any]) -> Tensor:
        try:
            return decode([jpeg], self._device)[0]
        except RuntimeError as error:
            check_resources(error, record["file_name"])
            raise self._error(record, (str(error) or "no reason given").splitlines()[0]) from None

    def _error(self, record: dict[str, Any], reason: str) -> DataError:
        return DataError(
            f"image {record['file_name']} in the shards at {self._dataset.uri} cannot be decoded: {reason}",
            fix="set loader.decoder=cpu if the GPU's decoder is at fault; `kubedet data verify --repair` on "
            "that folder finds and mends a shard that has changed since it was written",
        )


def check(device: torch.device) -> None:
    """Check that the device can decode.

    Raises:
        ConfigError: saying what it lacks.
    """
    if device.type != "cuda":
        raise ConfigError(
            "loader.decoder=gpu needs an NVIDIA GPU, and this process has none", fix="set loader.decoder=cpu"
        )
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"loader.decoder=gpu needs the package torchcodec, 0.16 or newer: {reason}",
            fix="install it with `pip install 'kubedet[gpu]'`, or set loader.decoder=cpu",
        ) from None


def decode(jpegs: Sequence[bytes], device: torch.device) -> list[Tensor]:
    """Decode a batch of JPEGs.

    Args:
        jpegs: their bytes.
        device: where the pixels are wanted; a GPU decodes them itself.

    Returns:
        uint8 RGB [3, H, W] each.

    Raises:
        RuntimeError: one of them cannot be decoded.
    """
    from torchcodec.decoders import decode_jpeg

    return list(decode_jpeg(list(jpegs), mode="RGB", device=device))


def draw_picture(images: Iterator[Tensor], picture: Composition, size: int) -> Tensor:
    """Draw a picture, as `transforms.render` and `decoding.blend` do on the host.

    Args:
        images: uint8 [3, H, W] each, as large as they are stored; as many are taken as the picture has tiles.
        picture: what is shown of them, and where.
        size: side S of the square.

    Returns:
        uint8 [S, S, 3] on the images' device.
    """
    square: Tensor | None = None
    for tiles in picture.layers:
        drawn = [(draw_view(next(images), tile.view, *tile.area[2:]), tile.area) for tile in tiles]
        layer = torch.empty((size, size, 3), dtype=torch.uint8, device=drawn[0][0].device)
        for pixels, (left, top, width, height) in drawn:
            layer[top : top + height, left : left + width] = pixels
        if square is None:
            square = layer
        else:
            mean = square.int() * picture.share + layer.int() * (256 - picture.share) + 128
            square = (mean >> 8).to(torch.uint8)
    assert square is not None
    return square


def draw_view(image: Tensor, view: View, canvas_width: int, canvas_height: int) -> Tensor:
    """Draw what a view shows of an image.

    Args:
        image: uint8 [3, H, W], as large as it is stored.
        view: of this image. Where the host's decoder divides the sides, blocks of pixels are averaged here.
        canvas_width: of what is drawn, pixels.
        canvas_height: of what is drawn, pixels.

    Returns:
        uint8 [canvas_height, canvas_width, 3] on the image's device.
    """
    shape = (canvas_height, canvas_width, 3)
    canvas = torch.full(shape, FILL, dtype=torch.uint8, device=image.device)
    left, top, width, height = view.crop
    x, y, place_width, place_height = view.place
    seen = _divided(image, view.divisor)[:, top : top + height, left : left + width]
    if (height, width) != (place_height, place_width):
        seen = tv.resize(seen, [place_height, place_width], antialias=True)
    turned = [axis for axis, flip in ((-1, view.flip), (-2, view.flip_vertical)) if flip]
    if turned:
        seen = seen.flip(turned)
        x = canvas_width - x - place_width if view.flip else x
        y = canvas_height - y - place_height if view.flip_vertical else y
    canvas[y : y + place_height, x : x + place_width] = seen.permute(1, 2, 0)
    return canvas


def _divided(image: Tensor, divisor: int) -> Tensor:
    """The image with its sides divided, rounded up: means of blocks, those at the border smaller."""
    if divisor == 1:
        return image
    means = F.avg_pool2d(image[None].float(), divisor, ceil_mode=True, count_include_pad=False)
    return means[0].round_().to(torch.uint8)
