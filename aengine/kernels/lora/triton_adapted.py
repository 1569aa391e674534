"""Linears and experts with each token's adapter, on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Linear, Norm
from aengine.kernels.linear.low_rank import RANKS, LowRank
from aengine.kernels.linear.one_row import OneRowConfig
from aengine.kernels.linear.small_linear import LinearConfig, linear_config
from aengine.kernels.linear.triton_linear import TritonLinear
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
from aengine.kernels.lora.config import expand_config, shrink_config, shrink_few_config, shrink_row_config
from aengine.kernels.lora.expand import expand
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.lora.pairs import PairFactors, gate_pairs, shrink_pairs, sum_pairs
from aengine.kernels.lora.shrink import shrink, shrink_few, shrink_row
from aengine.kernels.parts import Parts


class TritonAdapted:
    """A linear of any format, followed by two kernels for adapters. Without adapters it only calls the linear.

    All work is enqueued on the current stream. Only one stream may use it at a time.
    """

    def __init__(
        self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder, scratch: Parts
    ) -> None:
        """order: the order of `tokens`. All linears of a model share order and scratch."""
        self.inputs = linear.inputs
        self.outputs = linear.outputs
        self._linear = linear
        self._weights = weights
        self._tokens = tokens
        self._order = order
        parts = torch.arange(len(weights.outputs), dtype=torch.int8).repeat_interleave(torch.tensor(weights.outputs))
        self._scratch = scratch
        self._parts = parts.to(weights.b.device)  # [outputs]: the part of each output

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
        return None

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the product of x [tokens, inputs] and the adapters to y [tokens, outputs] in place, and return y."""
        if not len(x):
            return y
        order, a, b = self._order, self._weights.a, self._weights.b
        config = shrink_config(order.capacity, order.height, *a.shape[1:], a.element_size(), launch_for(x.device))
        inner = shrink(x.contiguous(), a, order, config, self._scratch)
        cut = expand_config(order.height, b.element_size())
        return expand(inner, b, self._parts, self._weights.outputs, y, order, cut)


class DenseAdapted(TritonAdapted):
    """A dense linear whose kernel for few rows adds the adapters. One small kernel precedes it."""

    def __init__(
        self, linear: TritonLinear, weights: AdapterWeights, tokens: TokenAdapters, order: TokenOrder, scratch: Parts
    ) -> None:
        super().__init__(linear, weights, tokens, order, scratch)
        self._dense = linear

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        config, dense = self._config(len(x)), self._dense
        if config is None:
            return super().apply(x, norm=norm, gated=gated, residual=residual)
        if isinstance(config, OneRowConfig):
            if norm is not None and not dense.norms(x, norm):
                x, norm = norm(x), None
            inner, x = self._row(x, norm, gated)
            return dense.apply(x, norm=norm, residual=residual, low_rank=self._as_low_rank(inner))
        if gated:
            x = silu_mul(x)
        elif norm is not None:
            x = norm(x)
        x = x.contiguous()
        return dense.apply(x, residual=residual, low_rank=self._low_rank(x))

    def _config(self, rows: int) -> LinearConfig | OneRowConfig | None:
        """Return the config of the kernel for so many rows. None: it does not add adapters, or there are none."""
        if self._tokens.places is None:
            return None
        weight, weights = self._dense.weight, self._weights
        if not weight.is_contiguous() or weights.rank not in RANKS:
            return None
        config = linear_config(rows, *weight.shape, weight.element_size(), launch_for(weight.device))
        # A tile must be within one part.
        if isinstance(config, LinearConfig) and any(width % config.block_n for width in weights.outputs):
            return None
        return config

    def _low_rank(self, x: Tensor) -> LowRank:
        """Return the adapters' part of several rows for the product. Launch nothing between this and the product."""
        order, a = self._order, self._weights.a
        config = shrink_few_config(a.shape[2], a.element_size())
        return self._as_low_rank(shrink_few(x, a, self._weights.rank, order, config, self._scratch))

    def _row(self, x: Tensor, norm: Norm | None = None, silu: bool = False) -> tuple[Tensor, Tensor]:
        """Return A x of one row, and the input of the product: x, or if silu SiLU(gate) * up."""
        a = self._weights.a
        config = shrink_row_config(*a.shape[1:])
        return shrink_row(x.contiguous(), a, self._order.places, config, norm, silu)

    def _as_low_rank(self, inner: Tensor) -> LowRank:
        order = self._order
        return LowRank(inner, self._weights.b, self._parts, order.places, order.tiles, order.count)


class TritonAdaptedExperts:
    """Experts of any format with adapters. Without adapters it only calls the experts.

    With adapters the products write gate and up to memory. The activation then adds the
    adapters of gate and up, and the sum over a token's experts adds the adapters of down. All work is enqueued on the
    current stream. Only one stream may use it at a time.
    """

    def __init__(self, experts: TritonExperts, weights: ExpertAdapters, tokens: TokenAdapters) -> None:
        self.experts, self.hidden = experts.experts, experts.hidden
        self._experts = experts
        self._weights = weights  # kept alive: the factors hold addresses of its tensors
        self._gate_up, self._down = PairFactors.from_weights(weights.gate_up), PairFactors.from_weights(weights.down)
        self._tokens = tokens

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        places = self._tokens.places
        if places is None or not len(h):
            return self._experts.add_to(h, ids, weights, residual)
        h, ids, weights, places = h.contiguous(), ids.contiguous(), weights.contiguous(), places.contiguous()
        residual = None if residual is None else residual.contiguous()
        one = self._experts.begin(h, ids)
        both = one.gate_up()
        first = shrink_pairs(h, self._gate_up, one, ids, places, of_tokens=True)
        inner = gate_pairs(both, first, self._gate_up, self._experts.rule, one, ids, places)
        rows = one.down(inner)
        second = shrink_pairs(inner, self._down, one, ids, places, of_tokens=False)
        return sum_pairs(rows, second, self._down, one, ids, weights, places, residual)
