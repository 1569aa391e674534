"""What the blocks of a decoder ask of their device, attention aside."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aengine.kernels.attention.heads import Heads, LatentHeads
from aengine.kernels.delta.base import DeltaNet, DeltaWeights
from aengine.kernels.experts.base import Experts, RegisteredExperts
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.kv_scales import NO_SCALES, KVScales
from aengine.kernels.linear.base import Linear, Norm, RegisteredLinear
from aengine.kernels.linear.weights import QuantizedWeight
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters


class Route(Protocol):
    """Chooses each token's experts, and their weights."""

    def after(self, norm: Norm | None, x: Tensor, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] -> norm(x), or x if norm is None, and the choice, computed in float32: ids int32
        [tokens, top_k], weights float32 [tokens, top_k]. One kernel does both if that is faster.

        slots [tokens] int64: a token below `first_slot` is padding, and goes nowhere: its ids are -1.
        """
        ...


class Kernels(Protocol):
    """Makes norms and linears of tensors, and has the operations between them, over the tokens of one step.

    Everything enqueues only: no host sync, no shape that depends on a tensor's values, so that a step
    can be captured into a CUDA graph. Norms and rotary embeddings compute in float32 whatever the dtype
    of their input is. Inputs are never modified, except for the caches and where it says so.
    """

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """An RMS norm with weight [width], which may be filled later."""
        ...

    def dense(self, weight: Tensor, bias: Tensor | None) -> RegisteredLinear:
        """A linear of weight [outputs, inputs] and bias [outputs], whose contents are final."""
        ...

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> RegisteredLinear:
        """A linear of a quantised matrix and a bias [outputs], for inputs of `dtype`."""
        ...

    def adapted(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> Linear:
        """A linear of these kernels, and to each token's result what its adapter adds. `tokens` says which one that is,
        whenever the linear is called; where none has one, the linear is called as if it stood alone.

        x has as many rows as `tokens.places`, in that order.
        """
        ...

    def adapted_experts(self, experts: Experts, weights: ExpertAdapters, tokens: TokenAdapters) -> Experts:
        """The same of experts of these kernels."""
        ...

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype, rule: ExpertRule = SILU
    ) -> RegisteredExperts:
        """Experts of quantised matrices, of the shapes of `experts`, for inputs of `dtype`."""
        ...

    def experts(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> RegisteredExperts:
        """Experts of gate_up [experts, 2 * inter, hidden], gate's rows first, and down [experts, hidden, inter]."""
        ...

    def with_shared(
        self, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> Experts | None:
        """Experts of these kernels and the one that all tokens pass, to be called with h [tokens, hidden] and top_k
        experts a token, where both together take fewer launches than one after the other; None: they do not.

        gate_up [2 * inter, hidden], down [hidden, inter]: of that expert; gate [1, hidden]: what it gives is times the
        sigmoid of h gate^T; None: it is added as it is.
        """
        ...

    def route(self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None = None) -> Route:
        """The choice of experts by a router's weight [experts, hidden], the correction [experts] of its scores and the
        bias [experts] of its product, all of which may be filled later."""
        ...

    def delta_net(self, weights: DeltaWeights) -> DeltaNet:
        """What lies between the projections of a layer of linear attention."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [tokens, 2 * intermediate], gate first -> [tokens, intermediate]."""
        ...

    def gated_silu_mul(self, gate_up: Tensor, h: Tensor, row: Tensor) -> Tensor:
        """The same times sigmoid(h row^T), a factor of each token: h [tokens, hidden], row [1, hidden]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The same of GELU, by its approximation with a hyperbolic tangent."""
        ...

    def gate_output(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [tokens, heads * dim], which may be used up, times the sigmoids of gates [tokens, heads, dim], each rounded
        to the dtype of x; the last axis of gates is contiguous."""
        ...

    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        heads: Heads,
        cos_sin: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        slots: Tensor,
        scales: KVScales = NO_SCALES,
        out: Tensor | None = None,
    ) -> Tensor:
        """Split a projection into heads, normalise and rotate q and k, and write k and v into the cache.

        qkv [tokens, (heads + 2 * kv_heads) * dim]: q, then k, then v, unless `heads` says otherwise; with gates, each
        head of q before its gate.
        cos_sin [max_positions, rotated] float32: cosines of the rotated / 2 frequencies, then sines. Of each head the
        first `rotated` elements are turned, the others are not; there may be no columns.
        positions [tokens] int64: rows of `cos_sin`; the rotation pairs element i with i + rotated / 2.
        cache: of keys and of values, [pages, page_size, kv_heads, dim], written at slots [tokens] int64, each
        page * page_size + offset. Several tokens may name one slot only in page 0, which is scratch. scales: of an FP8
        cache, as `encode` takes them.

        Returns q [tokens, heads, dim], which is `out` where that is given, contiguous; else its strides may not be.
        """
        ...

    def latent_inputs(
        self,
        latents: Tensor,
        q: Tensor,
        heads: LatentHeads,
        cos_sin: Tensor,
        positions: Tensor,
        cache: Tensor,
        slots: Tensor,
        out: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Normalise and rotate latents, write them into the cache, and rotate the ends of queries.

        latents [tokens, rank + rotated]: the first `rank` are normalised, those behind them are turned. q [tokens,
        heads, plain + rotated]: the last `rotated` of each head are turned, and become the last ones of out [tokens,
        heads, rank + rotated], whose others are left alone. What is turned comes out as the first of all pairs, then
        the second. cos_sin, positions: as above, with as many columns. cache [pages, page_size, 1, rank + rotated],
        written at slots as above; scale: of an FP8 cache.
        """
        ...
