"""The tensors that hold keys and values, cut into pages."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.kv_scales import as_bytes


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a page: keys and values of `page_size` tokens in each layer."""

    num_layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of keys and values, whatever the model computes in

    @property
    def page_bytes(self) -> int:
        """The bytes of one page over all layers."""
        return self.num_layers * 2 * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def split(self, places: Collection[int]) -> tuple[KVShape, KVShape]:
        """The shapes of all layers but those at these places, and of those."""
        return replace(self, num_layers=self.num_layers - len(places)), replace(self, num_layers=len(places))


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """The layers that keep their keys and values in pages of the window group, and how many of these there are."""

    places: tuple[int, ...]  # among all layers of the pool
    num_pages: int


class KVPool:
    """K and V of all layers in one allocation, zero-initialised: [layers, 2, pages, page_size, kv_heads, head_dim].

    Those of the window group are in a pool of their own, `sliding`.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, device: torch.device, sliding: SlidingLayers | None = None
    ) -> None:
        """shape: of all layers."""
        self.sliding: KVPool | None = None
        if sliding is not None:
            shape, own = shape.split(sliding.places)
            self.sliding = KVPool(own, sliding.num_pages, device)
        self.num_pages = num_pages
        self.page_size = shape.page_size
        self.page_bytes = shape.page_bytes
        sizes = (shape.num_layers, 2, num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self.data = (
            host_zeros(sizes, shape.dtype)
            if device.type == "cpu"
            else torch.zeros(sizes, dtype=shape.dtype, device=device)
        )
        self._layers = [(layer[0], layer[1]) for layer in self.data]  # views, made once
        self._all = list(self._layers)
        if sliding is not None and self.sliding is not None:
            for place, layer in zip(sorted(sliding.places), self.sliding._layers, strict=True):
                self._all.insert(place, layer)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of layer i, whatever group it is of, as views, each [pages, page_size, kv_heads, head_dim]."""
        return self._all[i]

    def by_page(self) -> Tensor:
        """The pool's bytes as a view [pages, layers * 2, bytes of a page in a layer] uint8, the first two strided."""
        layers, both, pages = self.data.shape[:3]
        return self.data.view(layers * both, pages, -1).view(torch.uint8).transpose(0, 1)

    def copy_pages(self, source: Tensor, destination: Tensor) -> None:
        """Copy pages source[i] to destination[i] in all layers of this group; both [n] int64 on the pool's device.

        The two may not overlap. Layer by layer, so that the temporary stays small.
        """
        for keys, values in self._layers:
            for kept in (as_bytes(keys), as_bytes(values)):
                kept[destination] = kept[source]


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed host memory that the system hands out only as it is touched: torch touches all of it at once."""
    if not math.prod(shape):
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
