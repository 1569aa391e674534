"""The operations of a decoder's blocks on a device, except attention."""

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
from aengine.kernels.linear.weights.base import QuantizedWeight
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
    """Makes norms, linears and experts of tensors, and has the operations between them.

    Every operation only enqueues work: no host sync, and no shape that depends on a tensor's values. So a step can be
    captured into a CUDA graph. Norms and rotary embeddings compute in float32, whatever the dtype of their input.
    Inputs are not modified, except caches and where a docstring says so.
    """

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """Make an RMS norm of a weight [width], which may be filled later."""
        ...

    def dense(self, weight: Tensor, bias: Tensor | None) -> RegisteredLinear:
        """Make a linear of weight [outputs, inputs] and bias [outputs], which have their final contents."""
        ...

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> RegisteredLinear:
        """Make a linear of a quantised matrix and a bias [outputs], for inputs of `dtype`."""
        ...

    def adapted(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> Linear:
        """Make a linear that adds to each token's result what its adapter adds.

        linear: of these kernels. If no token has an adapter, it is called alone.
        tokens: says which adapter each token of a step has. The linear's x has a row for each of `tokens.places`.
        """
        ...

    def adapted_experts(self, experts: Experts, weights: ExpertAdapters, tokens: TokenAdapters) -> Experts:
        """Like adapted(), for experts of these kernels."""
        ...

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype, rule: ExpertRule = SILU
    ) -> RegisteredExperts:
        """Make experts of quantised matrices, with the shapes of `experts`, for inputs of `dtype`."""
        ...

    def experts(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> RegisteredExperts:
        """Make experts of gate_up [experts, 2 * inter, hidden], gate first, and down [experts, hidden, inter]."""
        ...

    def with_shared(
        self, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> Experts | None:
        """Make experts that also compute the shared expert. None: this takes no fewer launches than both in turn.

        experts: of these kernels.
        gate_up, down: of the shared expert, [2 * inter, hidden] and [hidden, inter].
        gate: [1, hidden]. The shared expert's result is multiplied with the sigmoid of h gate^T. None: it is not.
        h, top_k: what the experts will be called with, [tokens, hidden] and so many experts for each token.
        """
        ...

    def route(self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None = None) -> Route:
        """Make the choice of experts. All tensors may be filled later.

        weight: the router's, [experts, hidden]. correction: of its scores, [experts]. bias: of its product, [experts].
        """
        ...

    def delta_net(self, weights: DeltaWeights) -> DeltaNet:
        """Make what a layer of linear attention computes between its projections."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return SiLU(gate) * up: [tokens, 2 * intermediate], gate first -> [tokens, intermediate]."""
        ...

    def gated_silu_mul(self, gate_up: Tensor, h: Tensor, row: Tensor) -> Tensor:
        """Like silu_mul(), times sigmoid(h row^T), a factor of each token: h [tokens, hidden], row [1, hidden]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Like silu_mul(), with GELU in its tanh approximation."""
        ...

    def gate_output(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x times the sigmoids of gates, which are rounded to the dtype of x.

        x: [tokens, heads * dim]. Its memory may be used for the result.
        gates: [tokens, heads, dim], with a contiguous last axis.
        """
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

        qkv: [tokens, (heads + 2 * kv_heads) * dim]: q, then k, then v, unless `heads` says otherwise. If there are
            gates, each head of q is followed by its gate.
        cos_sin: [max_positions, rotated] float32: cosines of the rotated / 2 frequencies, then sines. The first
            `rotated` elements of each head are rotated; there may be none.
        positions: [tokens] int64, rows of `cos_sin`. The rotation pairs element i with i + rotated / 2.
        cache: of keys and of values, [pages, page_size, kv_heads, dim].
        slots: [tokens] int64, where the cache is written: page * page_size + offset. Several tokens may have one slot
            only in page 0, which is scratch.
        scales: of an FP8 cache, as `encode` takes them.

        Returns q [tokens, heads, dim]. It is `out` if that is given, which is contiguous. Otherwise it may be strided.
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

        latents: [tokens, rank + rotated]. The first `rank` columns are normalised, the others rotated.
        q: [tokens, heads, plain + rotated]. The last `rotated` elements of each head are rotated.
        out: [tokens, heads, rank + rotated]. Its last `rotated` elements become those of q; the others are not written.
        cache: [pages, page_size, 1, rank + rotated]. scale: of an FP8 cache.
        cos_sin, positions, slots: as in qk_norm_rope_store().

        Rotated elements are stored as the first of all pairs, then the second of all pairs.
        """
        ...
