"""The preprocessing that clients of an exported model must repeat."""

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from trainer.config.types import FILL, NetworkInput, Resize
from trainer.data.images import to_8_bit
from trainer.data.transforms import fit_image

RESIZE_DESCRIPTIONS = {
    "letterbox": "RGB uint8; resize (bilinear, antialiased) so that the longer side is input_size; place at "
    "the top left of a square filled with {fill}",
    "squash": "RGB uint8; resize (bilinear, antialiased) to input_size x input_size, whatever the aspect",
}
"""Descriptions for model_metadata.json, by the value of `loader.resize`."""
BOX_DESCRIPTION = (
    "; x (y) in the image = x (y) in the square * width (height) of the image / that of the resized image"
)


def preprocess(
    image: Image.Image | np.ndarray, input_size: int, resize: Resize = "letterbox", fill: int = FILL
) -> tuple[Tensor, np.ndarray]:
    """Return the input of an exported model, uint8 [3, input_size, input_size], and the scales [4].

    `image` is a PIL image or uint8 RGB [H, W, 3]. As in training, EXIF orientation is applied, 16 bits are
    reduced to 8, and transparent parts become white. The other arguments are in the section `input` of
    model_metadata.json. Divide the model's boxes, x1 y1 x2 y2, by the scales.
    """
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    pixels = torch.from_numpy(np.array(to_upright_rgb(image))).permute(2, 0, 1).contiguous()
    square, scales = fit_image(pixels, NetworkInput(input_size, resize, fill))
    return square, np.array(scales)


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """Return an image as training reads it: EXIF orientation applied, 8 bits, RGB."""
    return to_8_bit(ImageOps.exif_transpose(image)).convert("RGB")
