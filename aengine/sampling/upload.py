"""Copies small arrays from the host to the device, without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor on the device with the array's contents. The array must not change afterwards.

    The copy reads pinned memory, which torch does not reuse before the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
