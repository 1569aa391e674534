"""What the first steps on a device would wait for, loaded by a thread while others import packages."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aengine.model.checkpoint.staging import staging_ring


@torch.inference_mode()
def load_libraries(device: torch.device, dtype: torch.dtype, reads: bool) -> None:
    """cuBLAS, and if weights will be read the pinned memory that they come through: torch keeps both for the next who
    asks. None of it holds the interpreter.
    """
    with torch.cuda.device(device):
        square = torch.zeros((64, 64), dtype=dtype, device=device)
        F.linear(square, square)
        square.addmm_(square, square)
    if reads:
        staging_ring(device)
