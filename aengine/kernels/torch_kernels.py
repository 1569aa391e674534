"""The reference implementation of `Kernels` in plain torch, for any device. Others are tested against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.attention.heads import Heads, LatentHeads
from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.torch_delta import TorchDelta
from aengine.kernels.experts.base import Experts
from aengine.kernels.experts.routing.router import Router, TorchRoute
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.experts.torch_experts import TorchExperts
from aengine.kernels.kv_scales import FP8, NO_SCALES, KVScales, as_bytes, encode
from aengine.kernels.linear.base import Linear, RegisteredLinear
from aengine.kernels.linear.torch_linear import TorchLinear
from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.lora.base import AdapterWeights, ExpertAdapters, TokenAdapters
from aengine.kernels.lora.torch_adapted import TorchAdapted, TorchAdaptedExperts
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.mamba.torch_mamba import TorchMamba


@dataclass(slots=True)
class TorchNorm:
    """An RMS norm. It rounds to the model's dtype before it applies the weight, as models were trained."""

    weight: Tensor
    eps: float
    is_rms: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        width = (x.shape[-1],)
        if x.dtype == torch.float32:
            return F.rms_norm(x, width, self.weight, self.eps)
        return F.rms_norm(x.float(), width, None, self.eps).to(x.dtype).mul_(self.weight)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))


class TorchKernels:
    """`Kernels` in as few torch operations as possible, because their number limits a small model's speed on a CPU."""

    def norm(self, weight: Tensor, eps: float) -> TorchNorm:
        return TorchNorm(weight, eps)

    def dense(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> TorchLinear:
        return TorchLinear(weight.dequantize().to(dtype), bias)

    def gains_by_fp8(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False

    def rounded(self, linear: RegisteredLinear) -> RegisteredLinear:
        return linear

    def adapted(self, linear: Linear, weights: AdapterWeights, tokens: TokenAdapters) -> TorchAdapted:
        return TorchAdapted(linear, weights, tokens)

    def adapted_experts(self, experts: Experts, weights: ExpertAdapters, tokens: TokenAdapters) -> TorchAdaptedExperts:
        if not isinstance(experts, TorchExperts):
            raise TypeError(f"these experts are of other kernels: {type(experts).__name__}")
        return TorchAdaptedExperts(experts, weights, tokens)

    def quantized_experts(
        self, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype, rule: ExpertRule = SILU
    ) -> TorchExperts:
        return TorchExperts(gate_up.dequantize().to(dtype), down.dequantize().to(dtype), rule)

    def experts(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> TorchExperts:
        return TorchExperts(gate_up, down, rule)

    def with_shared(
        self, experts: Experts, gate_up: Linear, down: Linear, gate: Tensor | None, h: Tensor, top_k: int
    ) -> None:
        return None

    def route(
        self, weight: Tensor, correction: Tensor | None, router: Router, bias: Tensor | None = None
    ) -> TorchRoute:
        return TorchRoute(weight, correction, router, bias)

    def delta_net(self, weights: DeltaWeights) -> TorchDelta:
        return TorchDelta(weights)

    def mamba(self, weights: MambaWeights) -> TorchMamba:
        return TorchMamba(weights)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gated_silu_mul(self, gate_up: Tensor, h: Tensor, row: Tensor) -> Tensor:
        return self.silu_mul(gate_up).mul_(F.linear(h, row).sigmoid_())

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def xielu(self, x: Tensor, values: Tensor) -> Tensor:
        wide, (p, n, b, e) = x.float(), values.unbind()
        negative = (torch.expm1(torch.minimum(wide, e)) - wide) * n
        return torch.where(wide > 0, p * wide * wide, negative).addcmul_(b, wide).to(x.dtype)

    def gate_output(self, x: Tensor, gates: Tensor) -> Tensor:
        return x.mul_(gates.sigmoid().flatten(1))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().unflatten(2, (cos.shape[1], 2, -1)).unbind(3)  # [tokens, heads, pieces, size / 2]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=3)
        return turned.flatten(2).to(x.dtype)

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
        k_cache, v_cache = cache
        kv_heads, dim = k_cache.shape[2:]
        if heads.kv == "nothing":
            kv_heads = 0
        split = qkv.view(qkv.shape[0], -1, dim)  # [tokens, heads + 2 * kv_heads, dim], or with the gates between
        if heads.gated:
            queries, rest = split.tensor_split([2 * heads.count], dim=1)
            split = torch.cat((queries[:, ::2], rest), dim=1)
        qk = split.narrow(1, 0, heads.count + kv_heads)
        v = split.narrow(1, heads.count + (kv_heads if heads.kv == "both" else 0), kv_heads)
        if heads.v_norm:
            v = F.rms_norm(v.float(), (dim,), None, heads.eps).to(qkv.dtype)
        if heads.q_norm is not None:
            qk = F.rms_norm(qk.float(), (dim,), None, heads.eps).to(qkv.dtype)
            qk.narrow(1, 0, heads.count).mul_(heads.q_norm)
        if heads.k_norm is not None:
            qk.narrow(1, heads.count, kv_heads).mul_(heads.k_norm)
        turned = _turned(qk.float(), cos_sin.index_select(0, positions).unsqueeze(1), heads.interleaved).to(qkv.dtype)
        q, k = turned.narrow(1, 0, heads.count), turned.narrow(1, heads.count, kv_heads)
        if not kv_heads:
            return q if out is None else out.copy_(q)
        for kept, new, scale in ((k_cache, k, scales.key), (v_cache, v, scales.value)):
            new = encode(new, scale) if kept.dtype == FP8 else new.to(kept.dtype)
            as_bytes(kept).view(-1, kv_heads, dim).index_copy_(0, slots, as_bytes(new))
        return q if out is None else out.copy_(q)

    def latent_inputs(
        self, latents: Tensor, q: Tensor, heads: LatentHeads, cos_sin: Tensor, positions: Tensor, cache: Tensor,
        slots: Tensor, out: Tensor, scale: float = 1.0,
    ) -> None:  # fmt: skip
        angles = cos_sin.index_select(0, positions).unsqueeze(1)
        normed = F.rms_norm(latents[:, : heads.rank].float(), (heads.rank,), None, heads.eps).to(latents.dtype)
        ends = _turned_ends(latents[:, None, heads.rank :], angles, heads.interleaved).squeeze(1)
        kept = torch.cat((normed.mul_(heads.weight), ends), dim=1)
        codes = encode(kept, scale) if cache.dtype == FP8 else kept.to(cache.dtype)
        as_bytes(cache).view(-1, kept.shape[1]).index_copy_(0, slots, as_bytes(codes))
        out[..., heads.rank :] = _turned_ends(q[..., -heads.rotated :], angles, heads.interleaved)


def _turned(qk: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `rotated` elements of each head: qk [tokens, heads, dim], cos_sin [tokens, 1, rotated].

    interleaved: pairs are neighbours in qk.
    """
    rotated = cos_sin.shape[-1]
    if not rotated:
        return qk
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = (qk[..., :rotated:2], qk[..., 1:rotated:2]) if interleaved else qk[..., :rotated].chunk(2, dim=-1)
    turned_first = torch.addcmul(first * cos, second, sin, value=-1)
    turned_second = torch.addcmul(second * cos, first, sin)
    if interleaved:
        turned_first, turned_second = torch.stack((turned_first, turned_second), dim=-1).flatten(-2).chunk(2, dim=-1)
    rest = (qk[..., rotated:],) if rotated < qk.shape[-1] else ()
    return torch.cat((turned_first, turned_second, *rest), dim=-1)


def _turned_ends(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, heads, rotated]. Returns the first elements of all pairs, then the second elements.

    cos_sin: [tokens, 1, rotated]. interleaved: pairs are neighbours in x.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
