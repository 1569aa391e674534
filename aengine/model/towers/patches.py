"""Turns the pixels of resized images into the inputs of a tower, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.model.towers.base import PatchBatch, patch_places


def batch_images(images: Sequence[tuple[Tensor, ImagePlan]], spec: ImageSpec, dtype: torch.dtype) -> PatchBatch:
    """Return the patches of images, in order.

    Args:
        images: Pixels [height, width, 3] uint8 on the tower's device, resized as the plan says, and their plans.
        dtype: The tower's. The numbers are computed in float32.
    """
    plans = [plan for _, plan in images]
    rows = torch.cat([patch_rows(pixels, spec, dtype) for pixels, _ in images])
    area = spec.merge**2
    return PatchBatch(rows, patch_places(plans, spec.merge, rows.device), tuple(plan.tokens * area for plan in plans))


def patch_rows(pixels: Tensor, spec: ImageSpec, dtype: torch.dtype) -> Tensor:
    """Return the scaled patches of one image: [patches, 3 * patch * patch], of each patch channel, row and column.

    pixels: [height, width, 3] uint8.
    """
    patch, merge, values = spec.patch, spec.merge, spec.pixels
    rows, columns = (size // (patch * merge) for size in pixels.shape[:2])
    parts = pixels.view(rows, merge, patch, columns, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    numbers = parts.reshape(-1, 3, patch * patch).to(torch.float32).mul_(values.factor)
    for channel, (mean, std) in enumerate(zip(values.mean, values.std)):  # a tensor of them would have to be uploaded
        numbers[:, channel].sub_(mean).div_(std)
    return numbers.flatten(1).to(dtype)
