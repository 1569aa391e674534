"""What a decoder layer asks of its device, attention aside."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """Pure tensor operations over the tokens of one step.

    Every method enqueues only: no host sync, no shape that depends on a tensor's values, so that a step
    can be captured into a CUDA graph. Norms and rotary embeddings compute in float32 whatever the dtype
    of their input is. Inputs are never modified, except for the caches and where it says so.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [tokens, hidden], weight [hidden] -> [tokens, hidden]."""
        ...

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of `rms_norm`: x [tokens, in], norm_weight [in], weight [out, in] -> [tokens, out]."""
        ...

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """`residual + linear(x)`: x [tokens, in], weight [out, in], residual [tokens, out], which may be used up."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [tokens, 2 * intermediate], gate first -> [tokens, intermediate]."""
        ...

    def pack(self, weight: Tensor) -> Tensor:
        """What `linear` is to be given for a matrix [out, in] from now on; called once for each, after loading."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in], weight [out, in] as loaded or as packed, bias [out] -> [tokens, out]."""
        ...

    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Split a projection into heads, normalise and rotate q and k, and write k and v into the cache.

        qkv [tokens, (heads + 2 * kv_heads) * dim]: q, then k, then v.
        q_weight, k_weight [dim]: weights of a per-head RMS norm, both or neither.
        cos_sin [max_positions, dim] float32: cosines of the dim / 2 frequencies, then sines.
        positions [tokens] int64: rows of `cos_sin`; the rotation pairs element i with i + dim / 2.
        k_cache, v_cache [pages, page_size, kv_heads, dim]: written at slots [tokens] int64, each
        page * page_size + offset. Several tokens may name one slot only in page 0, which is scratch.

        Returns q [tokens, heads, dim]; its strides may not be contiguous.
        """
        ...
