"""The reference: plain torch on any device. Every other implementation is tested against this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.packed_linear import pack, packed_linear


class TorchKernels:
    """`Kernels` in as few torch operations as possible: on a CPU and a small model their number is the time."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # The weight is applied in the model's dtype, after rounding, as the models were trained.
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def pack(self, weight: Tensor) -> Tensor:
        return pack(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear(x, weight, bias) if weight.is_mkldnn else F.linear(x, weight, bias)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads, dim = k_cache.shape[2:]
        tokens, half = qkv.shape[0], dim // 2
        qk, v = torch.split(qkv.view(tokens, -1, dim), [num_heads + kv_heads, kv_heads], dim=1)
        if q_weight is not None and k_weight is not None:
            qk = F.rms_norm(qk.float(), (dim,), None, eps).to(qkv.dtype)
            qk[:, :num_heads].mul_(q_weight)
            qk[:, num_heads:].mul_(k_weight)
        # Heads as [tokens, heads, 2, half]: the rotation pairs the two halves, [first, second].
        pairs = qk.float().reshape(tokens, -1, 2, half)
        cos, sin = cos_sin.index_select(0, positions).view(tokens, 1, 2, half).unbind(2)
        first, second = pairs.unbind(2)
        rotated = pairs * cos.unsqueeze(2)
        rotated[:, :, 0].addcmul_(second, sin, value=-1)
        rotated[:, :, 1].addcmul_(first, sin)
        q, k = torch.split(rotated.view(tokens, -1, dim).to(qkv.dtype), [num_heads, kv_heads], dim=1)
        k_cache.view(-1, kv_heads, dim).index_copy_(0, slots, k.to(k_cache.dtype))
        v_cache.view(-1, kv_heads, dim).index_copy_(0, slots, v.to(v_cache.dtype))
        return q, k, v
