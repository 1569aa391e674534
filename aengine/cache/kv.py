"""The tensors that hold keys and values, cut into pages."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """K and V of all layers in one allocation, zero-initialised: [layers, 2, pages, page_size, kv_heads, head_dim]."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, 2, num_pages, page_size, kv_heads, head_dim)
        self.data = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._layers = [(layer[0], layer[1]) for layer in self.data]  # views, made once

    @classmethod
    def bytes_per_page(cls, num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one page costs over all layers."""
        return num_layers * 2 * page_size * kv_heads * head_dim * dtype.itemsize

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of layer i as views, each [pages, page_size, kv_heads, head_dim]."""
        return self._layers[i]

    def copy_pages(self, source: Tensor, destination: Tensor) -> None:
        """Copy pages source[i] to destination[i] in all layers; both [n] int64 on the pool's device.

        The two may not overlap. Layer by layer, so that the temporary stays small.
        """
        for keys, values in self._layers:
            keys[destination] = keys[source]
            values[destination] = values[source]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory that the system hands out only as it is touched: torch touches all of it at once."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
