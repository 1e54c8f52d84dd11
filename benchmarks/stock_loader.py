"""Training data as torchvision's reference takes them in: single files, PIL, transforms of v2, processes."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv


def stock_loader(folder: Path, size: int, batch: int, workers: int) -> DataLoader[Any]:
    """Batches of the JPEGs in a folder, in squares of that size, from so many processes."""
    return DataLoader(
        _Files(folder, size), batch, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=True,
        collate_fn=lambda pairs: (torch.stack([image for image, _ in pairs]), [box for _, box in pairs]),
    )  # fmt: skip


class _Files(Dataset[Any]):
    """Single files with eight boxes each, each read when it is asked for."""

    def __init__(self, folder: Path, size: int) -> None:
        self._paths, self._size = sorted(folder.glob("*.jpg")), size
        self._flip, self._sanitize = v2.RandomHorizontalFlip(0.5), v2.SanitizeBoundingBoxes()
        self._boxes = torch.tensor([[20.0, 20.0, 200.0, 220.0]]).repeat(8, 1)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        image = tv.to_image(Image.open(self._paths[index]).convert("RGB"))
        height, width = image.shape[-2:]
        boxes = tv_tensors.BoundingBoxes(self._boxes, format="XYXY", canvas_size=(height, width))
        image, target = self._flip(image, {"boxes": boxes, "labels": torch.zeros(8, dtype=torch.int64)})
        scale = self._size / max(height, width)
        high, wide = round(height * scale), round(width * scale)
        image, target = v2.Resize([high, wide], antialias=True)(image, target)
        image, target = v2.Pad([0, 0, self._size - wide, self._size - high], fill=114)(image, target)
        return self._sanitize(image, target)
