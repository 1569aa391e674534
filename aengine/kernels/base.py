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
from aengine.kernels.mamba.base import Mamba, MambaWeights


class Route(Protocol):
    """Chooses each token's experts, and their weights."""

    def after(self, norm: Norm | None, x: Tensor, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Norm x, and choose the experts of each token in float32. One kernel does both if that is faster.

        Args:
            norm: None: x is not normed.
            x: [tokens, hidden].
            slots: [tokens] int64. A token whose slot is below `first_slot` is padding; its ids are -1.

        Returns norm(x), ids int32 [tokens, top_k] and weights float32 [tokens, top_k].
        """
        ...


class Kernels(Protocol):
    """Makes norms, linears and experts from tensors, and has the operations between them.

    Every operation only enqueues work. It needs no host sync, and no shape depends on a tensor's values. So a step can
    be captured into a CUDA graph. Norms and rotary embeddings compute in float32 for any dtype of their input. Inputs
    are not modified, except caches and if a docstring says so.
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

    def gains_by_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether linears of FP8 take less time than those of floats in `dtype`."""
        ...

    def rounded(self, linear: RegisteredLinear) -> RegisteredLinear:
        """Make a copy in FP8 of a linear of these kernels. Returns the linear if that gains nothing."""
        ...

    def adapted(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> Linear:
        """Make a linear that applies each token's adapter, too.

        linear: made by these kernels. If no token has an adapter, only this linear is called.
        tokens: the adapter of each token of a step. The linear's x has one row for each of `tokens.places`.
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
        """Make experts of gate_up [experts, 2 * inter, hidden], gate first, and down [experts, hidden, inter].

        If the rule has no gate, gate_up is up alone, [experts, inter, hidden].
        """
        ...

    def with_shared(
        self, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> Experts | None:
        """Make experts that also compute the shared expert. Returns None if that saves no launches.

        experts: made by these kernels.
        gate_up, down: the shared expert's linears, [2 * inter, hidden] and [hidden, inter].
        gate: [1, hidden]. The shared expert's result is multiplied by the sigmoid of h gate^T. None: it is not.
        h, top_k: the arguments of later calls: [tokens, hidden], and the number of experts for each token.
        """
        ...

    def route(self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None = None) -> Route:
        """Make the router that chooses experts. All tensors may be filled later.

        weight: [experts, hidden]. correction: [experts], added to the scores. bias: [experts], added to the product.
        """
        ...

    def delta_net(self, weights: DeltaWeights) -> DeltaNet:
        """Make the computation of a linear attention layer between its projections."""
        ...

    def mamba(self, weights: MambaWeights) -> Mamba:
        """Make the computation of a Mamba2 layer between its projections."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return SiLU(gate) * up: [tokens, 2 * intermediate], gate first -> [tokens, intermediate]."""
        ...

    def gated_silu_mul(self, gate_up: Tensor, h: Tensor, row: Tensor) -> Tensor:
        """Like silu_mul(), multiplied by sigmoid(h row^T) of each token. h: [tokens, hidden]. row: [1, hidden]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Like silu_mul(), with GELU in its tanh approximation."""
        ...

    def xielu(self, x: Tensor, values: Tensor) -> Tensor:
        """Return xIELU of x [tokens, width]: p x^2 + b x if x > 0, else n (exp(min(x, e)) - 1 - x) + b x.

        values: p, n, b and e, [4] float32.
        """
        ...

    def gate_output(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x times the sigmoids of gates, which are rounded to the dtype of x.

        x: [tokens, heads * dim]. Its memory may be used for the result.
        gates: [tokens, heads, dim], with a contiguous last axis.
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x with element i of each piece rotated together with element i + size / 2, computed in float32.

        x: [tokens, heads, pieces * size], with a contiguous last axis. Its memory may be used for the result.
        cos, sin: [tokens, pieces, size / 2] float32.
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

        qkv: [tokens, (heads + 2 * kv_heads) * dim]: q, then k, then v, unless `heads.kv` says otherwise. If
            `heads.gated`, a gate follows each head of q.
        cos_sin: [max_positions, rotated] float32: cosines of the rotated / 2 frequencies, then sines. The first
            `rotated` elements of each head are rotated; there may be none.
        positions: [tokens] int64, rows of `cos_sin`. The rotation pairs element i with i + rotated / 2, or if
            `heads.interleaved`, element 2 i with 2 i + 1.
        cache: of keys and of values, [pages, page_size, kv_heads, dim].
        slots: [tokens] int64, where the cache is written: page * page_size + offset. Tokens may share
            a slot only in page 0, which no sequence reads.
        scales: the scales of an FP8 cache, as in `encode`.

        Returns q [tokens, heads, dim]: `out`, which must be contiguous, or without it a tensor that may be strided.
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

        Of rotated elements, the first elements of all pairs are stored before the second elements.
        """
        ...
