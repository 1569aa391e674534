"""A step with images copies only what is uploaded, and never waits for a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.groups import leave_empty
from aengine.model.parameters import Parameters
from aengine.model.towers.build import build_tower
from aengine.model.towers.parts import TowerOps
from aengine.prompt_images import PromptImages
from aengine.runtime.step import image_memory, images
from aengine.runtime.step.images import ImageEncoder
from aengine.step_plan import ImageWork
from tests.model.images.specs import image_spec
from tests.runtime.step.test_images import PICTURES, placed, step


class NoWaiting(TorchDispatchMode):
    """Raises if a value is read on the host, or copied from it by any other means than an upload."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {one.device.type for one in (*args, out) if isinstance(one, Tensor) and one.dim()}
        if devices == {"cpu", "meta"} or func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError(f"{func} waits for the device")
        return out


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the sizes of uploads, whose tensors are on the meta device."""
    sizes: list[int] = []

    def upload(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        sizes.append(array.size)
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    monkeypatch.setattr(images, "upload", upload)
    monkeypatch.setattr(image_memory, "upload", upload)
    return sizes


@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-vl", "mistral3", "gemma3", "gemma4"])
def test_nothing_waits_for_the_device(
    case: str, tmp_path: Path, uploads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, meta = image_spec(case, tmp_path), torch.device("meta")
    kernels = TorchKernels()
    make = Parameters(kernels, torch.float32, meta)
    tower = build_tower(make, spec, TowerOps(kernels.rotate, TorchAttention().attend_whole))
    leave_empty(make.groups)
    encoder = ImageEncoder(spec, tower, torch.float32, meta, spec.rule.largest(4096))
    image = placed(spec, PICTURES[0], 1, 5)
    other = placed(spec, PICTURES[1], image.end + 1, 6)
    plan = step(1, [(0, other.end, PromptImages((image, other)))], [ImageWork(image, blocks=1)])
    before = torch.empty(plan.num_tokens, dtype=torch.int64, device=meta)
    monkeypatch.setattr(torch, "tensor", None)  # copies from the host, but dispatches nothing
    with NoWaiting():
        encoder.advance(plan)
        _, rows, mutual = encoder.place(plan, before)
    assert rows is not None
    assert (mutual is None) == spec.splittable
    assert len(uploads) == 3  # the pixels of two images, and the numbers of the step
