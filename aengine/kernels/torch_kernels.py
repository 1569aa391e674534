"""The reference: plain torch on any device. Every other implementation is tested against this one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.packed_linear import pack, packed_linear


class TorchKernels:
    """`Kernels` in as few torch operations as possible: on a CPU and a small model their number is the time."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # The weight is applied in the model's dtype, after rounding, as the models were trained.
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype).mul_(weight)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return self.linear(x, weight, bias).add_(residual)

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
    ) -> Tensor:
        kv_heads, dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, dim)  # [tokens, heads + 2 * kv_heads, dim]
        qk = heads.narrow(1, 0, num_heads + kv_heads)
        v = heads.narrow(1, num_heads + kv_heads, kv_heads)
        if q_weight is not None and k_weight is not None:
            qk = F.rms_norm(qk.float(), (dim,), None, eps).to(qkv.dtype)
            qk.narrow(1, 0, num_heads).mul_(q_weight)
            qk.narrow(1, num_heads, kv_heads).mul_(k_weight)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, dim / 2]
        first, second = qk.float().chunk(2, dim=-1)
        turned_first = torch.addcmul(first * cos, second, sin, value=-1)
        turned_second = torch.addcmul(second * cos, first, sin)
        turned = torch.cat((turned_first, turned_second), dim=-1).to(qkv.dtype)
        q, k = turned.narrow(1, 0, num_heads), turned.narrow(1, num_heads, kv_heads)
        k_cache.view(-1, kv_heads, dim).index_copy_(0, slots, k.to(k_cache.dtype))
        v_cache.view(-1, kv_heads, dim).index_copy_(0, slots, v.to(v_cache.dtype))
        return q
