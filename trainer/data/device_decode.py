"""Experimental: training images decoded and drawn by the GPU (`loader.decoder=gpu`), by nvJPEG.

The loader's threads read the bytes and choose the views; another thread hands a whole batch to the
device, on its own stream, and the training's stream waits there until it is drawn. It pays
where the host has too few cores for its GPUs. nvJPEG's pixels differ from libjpeg's by rounding,
so evaluation, whose scores must not depend on the machine, uses the host's decoder.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from trainer.base.errors import ConfigError, DataError, first_line
from trainer.base.os_errors import refuse_want
from trainer.data.augmentation import Composition
from trainer.data.transforms import FILL, View

Drawn = tuple[Tensor, torch.cuda.Event | None]
"""uint8 [B, S, S, 3] on the device, and the event that marks it as complete (None on a CPU)."""


class Undrawn:
    """The slot of an image in a batch that the device will draw: a loader thread fills it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.samples: list[list[tuple[bytes, dict[str, Any]]]] = []
        """The stored image and the record (file_name, width, height) of every tile of every layer."""
        self.picture = Composition((), 256)
        """What is to be drawn."""

    def fill(self, samples: list[list[tuple[bytes, dict[str, Any]]]], picture: Composition) -> None:
        """Take what the picture is drawn from."""
        self.samples, self.picture = samples, picture

    def __len__(self) -> int:
        """Side of the square, pixels."""
        return self._size


class DeviceDecoder:
    """Draws batches on a device, in the order in which they are submitted."""

    def __init__(self, device: torch.device, uri: str) -> None:
        """Begin; `uri` is that of the shards, for errors."""
        self._device, self._uri = device, uri
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-device")

    def places(self, count: int, size: int) -> list[Undrawn]:
        """Return a slot for each image of a batch; `size` is the side of the squares, pixels."""
        return [Undrawn(size) for _ in range(count)]

    def submit(self, brought: Sequence[Future[Any]], places: Sequence[Undrawn]) -> "Future[Drawn]":
        """Draw a batch once its places have been filled.

        Args:
            brought: done when the bytes are in their place.
            places: one for each image.
        """
        return self._thread.submit(self._draw, brought, places)

    def take(self, drawn: "Future[Drawn]") -> Tensor:
        """The images of a batch, uint8 [B, 3, S, S] in channels_last, for the present stream.

        Raises:
            DataError: naming the image that cannot be decoded.
        """
        images, whole = drawn.result()
        if whole is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(whole)
            # Its memory belongs to the other stream, which must not reuse it before this one is done.
            images.record_stream(stream)
        return images.permute(0, 3, 1, 2)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _draw(self, brought: Sequence[Future[Any]], places: Sequence[Undrawn]) -> Drawn:
        # Not by `wait`: it does not notice futures that a closing pool cancels.
        for future in brought:
            future.result()
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
            decoded = iter(
                self._decoded([sample for place in places for tiles in place.samples for sample in tiles])
            )
            images = torch.stack([draw_picture(decoded, place.picture, len(place)) for place in places])
            if self._stream is None:
                return images, None
            whole = torch.cuda.Event()
            whole.record(self._stream)
            return images, whole

    def _decoded(self, samples: Sequence[tuple[bytes, dict[str, Any]]]) -> list[Tensor]:
        """All images of a batch, uint8 [3, H, W] each, at their stored sizes."""
        try:
            images = decode([jpeg for jpeg, _ in samples], self._device)
        except RuntimeError:
            # The whole batch fails, and the error does not name the image.
            images = [self._decoded_alone(*sample) for sample in samples]
        for (_, record), image in zip(samples, images, strict=True):
            decoded_size, stored = tuple(image.shape[1:]), (record["height"], record["width"])
            if decoded_size != stored:
                raise self._error(
                    record,
                    f"it is of {decoded_size[1]}x{decoded_size[0]} pixels, not {stored[1]}x{stored[0]}",
                )
        return images

    def _decoded_alone(self, jpeg: bytes, record: dict[str, Any]) -> Tensor:
        try:
            return decode([jpeg], self._device)[0]
        except RuntimeError as error:
            refuse_want(error, record["file_name"])
            raise self._error(record, (str(error) or "no reason given").splitlines()[0]) from None

    def _error(self, record: dict[str, Any], reason: str) -> DataError:
        return DataError(
            f"image {record['file_name']} in the shards at {self._uri} cannot be decoded: {reason}",
            fix="set loader.decoder=cpu if the GPU's decoder is at fault; `kubedet data verify --repair` on "
            "that folder finds and mends a shard that has changed since it was written",
        )


def device_decoder(device: torch.device, uri: str) -> DeviceDecoder:
    """Return the decoder of a device; `uri` is that of the shards, for errors.

    Raises:
        ConfigError: there is no GPU, or the package is missing.
    """
    check(device)
    return DeviceDecoder(device, uri)


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
