"""The tensors that hold keys and values, in pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.kv_scales import as_bytes


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The size of the keys and values that a layer keeps of each token."""

    heads: int
    dim: int
    vectors: int = 2  # per head: a key and a value; 1: one vector serves as both

    @property
    def numbers(self) -> int:
        """The numbers kept for one token."""
        return self.vectors * self.heads * self.dim


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a page: the keys and values of `page_size` tokens in each layer."""

    layers: tuple[KVLayer, ...]
    page_size: int
    dtype: torch.dtype  # of keys and values; may differ from the model's dtype

    @property
    def page_bytes(self) -> int:
        """The bytes of one page over all layers."""
        return sum(layer.numbers for layer in self.layers) * self.page_size * self.dtype.itemsize

    def split(self, indices: Collection[int]) -> tuple[KVShape, KVShape]:
        """Return two shapes: one without the layers at these indices, and one with only these layers."""
        others = tuple(layer for i, layer in enumerate(self.layers) if i not in indices)
        return replace(self, layers=others), replace(self, layers=tuple(self.layers[i] for i in sorted(indices)))


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """The layers that keep their keys and values in pages of the window group."""

    indices: tuple[int, ...]  # among all layers of the pool
    num_pages: int


class KVPool:
    """The K and V of all layers, in one allocation that begins as zeros.

    Layers of equal shapes share one tensor: [layers, 2, pages, page_size, heads, dim], with 1 instead of 2 if one
    vector serves as key and value. Layers of the window group have a separate pool, `sliding`.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, device: torch.device, sliding: SlidingLayers | None = None
    ) -> None:
        """shape: the shape of a page over all layers, including those of the window group."""
        self.sliding: KVPool | None = None
        if sliding is not None:
            shape, window_shape = shape.split(sliding.indices)
            self.sliding = KVPool(window_shape, sliding.num_pages, device)
        self.num_pages = num_pages
        self.page_size = shape.page_size
        self.page_bytes = shape.page_bytes
        sizes = (shape.page_bytes // shape.dtype.itemsize * num_pages,)
        self.data = (
            host_zeros(sizes, shape.dtype)
            if device.type == "cpu"
            else torch.zeros(sizes, dtype=shape.dtype, device=device)
        )
        counts = Counter(shape.layers)
        runs = self.data.split([count * kind.numbers * shape.page_size * num_pages for kind, count in counts.items()])
        self._kinds = [
            run.view(count, kind.vectors, num_pages, shape.page_size, kind.heads, kind.dim)
            for run, (kind, count) in zip(runs, counts.items())
        ]
        each = {kind: iter(run) for kind, run in zip(counts, self._kinds)}
        # Views are made once, because making one takes microseconds.
        self._layers = [(layer[0], layer[-1]) for layer in (next(each[kind]) for kind in shape.layers)]
        self._all = list(self._layers)
        if sliding is not None and self.sliding is not None:
            for i, layer in zip(sorted(sliding.indices), self.sliding._layers, strict=True):
                self._all.insert(i, layer)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Return views of K and V of layer i, each [pages, page_size, heads, dim]. The two groups share
        one numbering.
        """
        return self._all[i]

    def by_page(self) -> list[Tensor]:
        """Return the pool's bytes as uint8 views, one for each group of layers with equal shapes.

        Each is [pages, layers * 2, bytes of a page in a layer]; the first two dimensions are strided.
        """
        return [
            kind.view(-1, self.num_pages, kind[0, 0, 0].numel()).view(torch.uint8).transpose(0, 1)
            for kind in self._kinds
        ]

    def copy_pages(self, source: Tensor, destination: Tensor) -> None:
        """Copy pages source[i] to destination[i] in all layers of this group; both [n] int64 on the pool's device.

        Source and destination must not overlap. Layers are copied one by one, so that the temporary tensor is small.
        """
        for keys, values in self._layers:
            for kept in (as_bytes(keys), as_bytes(values)):
                kept[destination] = kept[source]


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeroed host memory.

    The operating system provides it page by page on first use. torch.zeros would write all of it.
    """
    if not math.prod(shape):
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
