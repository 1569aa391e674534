"""Patches have the numbers that transformers' processors compute from the same image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aengine.model.images.resizing import ImagePlan
from aengine.model.images.spec import ImageSpec
from aengine.model.towers.patches import batch_images, patch_rows
from tests.model.images.specs import image_spec
from tests.model.towers.checkpoints import SEEING_CASES, SIZES, picture, processed, resized


@pytest.fixture(scope="module", params=sorted(SEEING_CASES))
def described(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ImageSpec]:
    return request.param, image_spec(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("size", SIZES)
def test_numbers_and_grid_of_one_image(described: tuple[str, ImageSpec], size: tuple[int, int]) -> None:
    case, spec = described
    image = picture(*size)
    plan = spec.plan(*size)
    pixels = torch.tensor(resized(image, plan.width, plan.height, spec.resample))
    expected = _by_token(case, spec, plan, processed(case, [image]))
    # One step of a pixel is 1/255, divided by a deviation. These are closer.
    torch.testing.assert_close(patch_rows(pixels, spec, torch.float32), expected, rtol=0, atol=1e-5)


def test_places_follow_the_order_of_patches(described: tuple[str, ImageSpec]) -> None:
    _, spec = described
    plans = [spec.plan(200, 120), spec.plan(64, 64)]
    images = [(torch.zeros(plan.height, plan.width, 3, dtype=torch.uint8), plan) for plan in plans]
    for pixels, _ in images:  # each patch has its row as its red and its column as its green
        rows, columns = (torch.arange(size // spec.patch) for size in pixels.shape[:2])
        pixels[..., 0] = rows.repeat_interleave(spec.patch)[:, None]
        pixels[..., 1] = columns.repeat_interleave(spec.patch)[None]
    batch = batch_images(images, spec, torch.float64)
    mean, std = (torch.tensor(three) for three in (spec.pixels.mean, spec.pixels.std))
    numbers = (batch.rows.unflatten(1, (3, -1))[..., 0] * std + mean) / spec.pixels.factor
    torch.testing.assert_close(numbers[:, :2].round().long(), batch.places[:, :2])
    sizes = [[plan.rows * spec.merge, plan.columns * spec.merge] for plan in plans]
    assert batch.lengths == tuple(rows * columns for rows, columns in sizes)
    expected = torch.cat([torch.tensor(size).expand(length, 2) for size, length in zip(sizes, batch.lengths)])
    assert torch.equal(batch.places[:, 2:], expected)


def _by_token(case: str, spec: ImageSpec, plan: ImagePlan, inputs: dict[str, Any]) -> Tensor:
    """Return the pixel values of one image in the order of our patches: [patches, 3 * patch * patch]."""
    values, patch, merge = inputs["pixel_values"], spec.patch, spec.merge
    if case.startswith("qwen"):
        assert inputs["image_grid_thw"].tolist() == [[1, plan.rows * merge, plan.columns * merge]]
        frames: Tensor = values.unflatten(1, (3, 2, -1))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        return frames[:, :, 0].flatten(1)
    if case.startswith("gemma4"):
        assert int(inputs["num_soft_tokens_per_image"][0]) == plan.tokens
        values = values[0, : plan.tokens * merge**2].unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2)
        grid = values.unflatten(0, (plan.rows, merge, plan.columns, merge))
        return grid.transpose(1, 2).flatten(0, 3).flatten(1)
    assert values.shape[2:] == (plan.height, plan.width)
    grid = values[0].unflatten(2, (plan.columns, merge, patch)).unflatten(1, (plan.rows, merge, patch))
    return grid.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3).flatten(1)
