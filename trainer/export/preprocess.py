"""The preprocessing that clients of an exported model must repeat."""

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from trainer.data.images import plain
from trainer.data.transforms import FILL, letterbox

RULE = (
    "RGB uint8; resize (bilinear, antialiased) so that the longer side is input_size; place at the top "
    f"left of a square filled with {FILL}; boxes in the image = boxes in the square / scale, "
    "scale = input_size / longer side"
)
"""Description for model_metadata.json."""


def preprocess(image: Image.Image | np.ndarray, input_size: int) -> tuple[Tensor, float]:
    """Make the input of an exported model: uint8 [3, input_size, input_size], and the scale.

    Takes a PIL image (EXIF orientation is applied, 16 bits become 8, transparent parts white, as in
    training) or uint8 RGB [H, W, 3]. Divide the model's boxes by the scale.
    """
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    upright = plain(ImageOps.exif_transpose(image)).convert("RGB")
    pixels = torch.from_numpy(np.array(upright)).permute(2, 0, 1).contiguous()
    return letterbox(pixels, input_size)
