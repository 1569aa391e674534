"""Loads libraries that the first steps need. It runs in a thread while another thread imports packages."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aengine.model.checkpoint.staging import staging_ring


@torch.inference_mode()
def load_libraries(device: torch.device, dtype: torch.dtype, reads: bool) -> None:
    """Load cuBLAS and, if weights will be read, allocate their pinned staging memory. Releases the GIL.

    torch caches both for later use.
    """
    with torch.cuda.device(device):
        square = torch.zeros((64, 64), dtype=dtype, device=device)
        F.linear(square, square)
        square.addmm_(square, square)
    if reads:
        staging_ring(device)
