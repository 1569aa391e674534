"""Linears with what each token's own adapter adds, on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.linear.low_rank import LowRank
from aengine.kernels.linear.triton_linear import TritonLinear
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.config import expand_config, shrink_config, shrink_few_config, shrink_row_config
from aengine.kernels.lora.expand import expand
from aengine.kernels.lora.expand_gated import expand_gated, expands_gated
from aengine.kernels.lora.order import LOW_UP_TO, TokenOrder
from aengine.kernels.lora.shrink import shrink
from aengine.kernels.lora.shrink_few import shrink_few
from aengine.kernels.lora.shrink_row import shrink_row
from aengine.kernels.parts import Parts


class TritonAdapted:
    """A linear of any format: adapters come in two kernels beside it, and where there are none, in no kernel.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(
        self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder, scratch: Parts
    ) -> None:
        """order, which is of these tokens, and scratch: shared by all linears of a model."""
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._weights = weights
        self._tokens = tokens
        self._order = order
        parts = torch.arange(len(weights.outputs), dtype=torch.int8).repeat_interleave(torch.tensor(weights.outputs))
        self._scratch = scratch
        self._parts = parts.to(weights.b.device)  # [outputs]: the part of each

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if self._tokens.places is None:
            return self._linear.apply(x, norm=norm, gated=gated, residual=residual)
        if gated:
            x = silu_mul(x)
        elif norm is not None:
            x = norm(x)
        return self._add(x, self._linear.apply(x, residual=residual))

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> Tensor | None:
        if self._tokens.places is None:
            return self._linear.apply_activated(x, norm)
        if len(x) <= LOW_UP_TO or not expands_gated(self._weights):
            return None
        x = x if norm is None else norm(x)
        return expand_gated(self._inner(x), self._weights, self._linear.apply(x), self._order)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """y [tokens, outputs], which is used up, and what the adapters make of x [tokens, inputs]."""
        if not len(x):
            return y
        order, b = self._order, self._weights.b
        cut = expand_config(order.height, b.element_size())
        return expand(self._inner(x), b, self._parts, self._weights.outputs, y, order, cut)

    def _inner(self, x: Tensor) -> Tensor:
        """A x [tokens, parts * rank] of x [tokens, inputs]."""
        order, a = self._order, self._weights.a
        config = shrink_config(order.capacity, order.height, *a.shape[1:], a.element_size(), launch_for(x.device))
        return shrink(x.contiguous(), a, order, config, self._scratch)


class DenseAdapted(TritonAdapted):
    """A dense linear, whose own kernel for few rows adds what the adapters add: one small kernel stands before it."""

    def __init__(
        self, linear: TritonLinear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder, scratch: Parts
    ) -> None:
        super().__init__(linear, weights, tokens, order, scratch)
        self._dense = linear

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if not self._adds(len(x)):
            return super().apply(x, norm=norm, gated=gated, residual=residual)
        dense = self._dense
        if dense.single(x):
            if norm is not None and not dense.norms(x, norm):
                x, norm = norm(x), None
            inner, x = self._row(x, norm, gated)
            return dense.apply(x, norm=norm, residual=residual, low_rank=self._given(inner))
        if gated:
            x = silu_mul(x)
        elif norm is not None:
            x = norm(x)
        x = x.contiguous()
        return dense.apply(x, residual=residual, low_rank=self._low_rank(x))

    def _adds(self, rows: int) -> bool:
        weights = self._weights
        return self._tokens.places is not None and self._dense.adds(rows, weights.outputs, weights.rank)

    def _low_rank(self, x: Tensor) -> LowRank:
        """A x of several rows, and what else the product needs. Launch nothing between this and the product."""
        order, a = self._order, self._weights.a
        config = shrink_few_config(a.shape[2], a.element_size())
        return self._given(shrink_few(x, a, self._weights.rank, order, config, self._scratch))

    def _row(self, x: Tensor, norm: Norm | None = None, silu: bool = False) -> tuple[Tensor, Tensor]:
        """A x of one row, and x for the product: before the norm, or SiLU(gate) * up."""
        a = self._weights.a
        config = shrink_row_config(*a.shape[1:])
        return shrink_row(x.contiguous(), a, self._order.places, config, norm, silu)

    def _given(self, inner: Tensor) -> LowRank:
        order = self._order
        return LowRank(inner, self._weights.b, self._parts, order.places, order.tiles, order.count)
