"""`Kernels` for CUDA devices: our Triton kernels where they win, cuBLAS for the large products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from aengine.kernels import norms, rope
from aengine.kernels.linear.small_linear import Norm, SmallLinear


class TritonKernels:
    """Everything is enqueued on the current stream; one stream at a time."""

    def __init__(self) -> None:
        self._small_linear = SmallLinear()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._small_linear.norms(x, weight):
            return self._small_linear(x, weight, bias, norm=Norm(norm_weight, eps))
        return self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if self._small_linear.supports(x, weight):
            return self._small_linear(x, weight, bias, residual=residual, out=residual)
        if bias is not None:
            residual += bias
        return residual.addmm_(x, weight.t())

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return norms.silu_mul(gate_up)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._small_linear.supports(x, weight):
            return self._small_linear(x, weight, bias)
        return F.linear(x, weight, bias)

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
        return rope.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slots, num_heads
        )
