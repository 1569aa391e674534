"""Linears with what each token's own adapter adds, on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.linear.low_rank import LowRank
from aengine.kernels.linear.triton_linear import TritonLinear
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.config import expand_config, shrink_config, shrink_row_config
from aengine.kernels.lora.expand import expand
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.lora.shrink import shrink
from aengine.kernels.lora.shrink_row import shrink_row
from aengine.kernels.norms import silu_mul


class TritonAdapted:
    """A linear of any format: adapters come in two kernels beside it, and where there are none, in no kernel.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder) -> None:
        """order: of these tokens, shared by all linears of a model."""
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._weights = weights
        self._tokens = tokens
        self._order = order
        parts = torch.arange(len(weights.outputs), dtype=torch.int8).repeat_interleave(torch.tensor(weights.outputs))
        self._parts = parts.to(weights.b.device)  # [outputs]: the part of each

    def __call__(self, x: Tensor) -> Tensor:
        out = self._linear(x)
        return out if self._tokens.places is None else self._add(x, out)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        out = self._linear.add_to(x, residual)
        return out if self._tokens.places is None else self._add(x, out)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        if self._tokens.places is None:
            return self._linear.add_gated_to(gate_up, residual)
        return self.add_to(silu_mul(gate_up), residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._linear.gated(gate_up) if self._tokens.places is None else self(silu_mul(gate_up))

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self._linear.after(norm, x) if self._tokens.places is None else self(norm(x))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """y [tokens, outputs], which is used up, and what the adapters make of x [tokens, inputs]."""
        if not len(x):
            return y
        order, b = self._order, self._weights.b
        return expand(self._inner(x), b, self._parts, y, order, expand_config(order.height, b.element_size()))

    def _inner(self, x: Tensor) -> Tensor:
        order, a = self._order, self._weights.a
        tiles, launch = order.capacity, launch_for(x.device)
        config = shrink_config(tiles, order.height, *a.shape[1:], a.element_size(), launch)
        return shrink(x.contiguous(), a, order, config)


class DenseAdapted(TritonAdapted):
    """A dense linear, whose own kernel for few rows adds what the adapters add: one small kernel stands before it."""

    def __init__(self, linear: TritonLinear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder) -> None:
        super().__init__(linear, weights, tokens, order)
        self._dense = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._dense(x, self._low_rank(x)) if self._adds(len(x)) else super().__call__(x)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._dense.add_to(x, residual, self._low_rank(x)) if self._adds(len(x)) else super().add_to(x, residual)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        if len(gate_up) == 1 and self._adds(1):
            inner, x = self._row(gate_up, silu=True)
            return self._dense.add_to(x, residual, self._of(inner))
        return super().add_gated_to(gate_up, residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        if len(gate_up) == 1 and self._adds(1):
            inner, x = self._row(gate_up, silu=True)
            return self._dense(x, self._of(inner))
        return super().gated(gate_up)

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        if self._adds(len(x)) and self._dense.norms(x):
            return self._dense.after(norm, x, self._of(self._row(x, norm)[0]))
        return super().after(norm, x)

    def _adds(self, rows: int) -> bool:
        weights = self._weights
        return self._tokens.places is not None and self._dense.adds(rows, weights.outputs, weights.rank)

    def _low_rank(self, x: Tensor) -> LowRank:
        return self._of(self._row(x)[0] if len(x) == 1 else self._inner(x))

    def _row(self, x: Tensor, norm: Norm | None = None, silu: bool = False) -> tuple[Tensor, Tensor]:
        a = self._weights.a
        config = shrink_row_config(*a.shape[1:])
        return shrink_row(x.contiguous(), a, self._order.places, config, norm, silu)

    def _of(self, inner: Tensor) -> LowRank:
        order = self._order
        return LowRank(inner, self._weights.b, self._parts, order.places, order.own, order.tiles, order.count)
