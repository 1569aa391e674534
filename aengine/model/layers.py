"""The parts of a decoder layer. Each holds its parameters as plain tensors; the math is the kernels'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionBatch
from aengine.kernels.base import Kernels
from aengine.model.config import ModelConfig


class Parameters:
    """Makes uninitialised parameters of one dtype on one device ("meta" for shapes alone) and names each.

    `views` maps the names that checkpoints use to the tensors they fill: a whole parameter, or some rows
    of a fused one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.views: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.fused({name: shape[0]}, *shape[1:])

    def fused(self, rows: dict[str, int], *shape: int) -> Tensor:
        """Parameters of these names and numbers of rows, one below the other in one tensor."""
        whole = torch.empty((sum(rows.values()), *shape), dtype=self.dtype, device=self.device)
        self.views.update(zip(rows, torch.split(whole, list(rows.values()))))
        return whole


@dataclass(slots=True)
class Linear:
    """y = x W^T + b. Every matrix of the model is made by `build`, so sharding and adapters have one place."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @classmethod
    def build(cls, make: Parameters, outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        """`outputs` gives the fused parts in order: their names without ".weight", and their output widths."""
        weight = make.fused({f"{name}.weight": width for name, width in outputs.items()}, inputs)
        return cls(weight, make.fused({f"{name}.bias": width for name, width in outputs.items()}) if bias else None)


@dataclass(slots=True)
class SelfAttention:
    qkv: Linear
    out: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    num_heads: int
    scale: float
    window: int | None
    eps: float

    @classmethod
    def build(cls, make: Parameters, prefix: str, config: ModelConfig, layer: int) -> SelfAttention:
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        widths = {
            f"{prefix}.q_proj": heads * dim,
            f"{prefix}.k_proj": kv_heads * dim,
            f"{prefix}.v_proj": kv_heads * dim,
        }
        return cls(
            qkv=Linear.build(make, widths, hidden, config.attention_bias),
            out=Linear.build(make, {f"{prefix}.o_proj": hidden}, heads * dim, config.o_bias),
            q_norm=make.tensor(f"{prefix}.q_norm.weight", dim) if config.qk_norm else None,
            k_norm=make.tensor(f"{prefix}.k_norm.weight", dim) if config.qk_norm else None,
            num_heads=heads,
            scale=dim**-0.5,
            window=config.window(layer),
            eps=config.rms_norm_eps,
        )

    def mix(
        self,
        x: Tensor,
        norm: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: tuple[Tensor, Tensor],
        kernels: Kernels,
        attention: AttentionBackend,
    ) -> Tensor:
        """x [tokens, hidden] -> [tokens, heads * head_dim], which `out` projects back to the hidden size.

        norm [hidden] is the weight of the norm that comes first. Writes this step's K and V into the layer's cache.
        """
        k_cache, v_cache = cache
        qkv = kernels.norm_linear(x, norm, self.eps, self.qkv.weight, self.qkv.bias)
        q = kernels.qk_norm_rope_store(
            qkv, self.q_norm, self.k_norm, self.eps, cos_sin, positions, k_cache, v_cache, batch.slots, self.num_heads
        )
        return attention.forward(q, k_cache, v_cache, batch, self.scale, self.window).flatten(1)


@dataclass(slots=True)
class MLP:
    gate_up: Linear
    down: Linear

    @classmethod
    def build(cls, make: Parameters, prefix: str, config: ModelConfig) -> MLP:
        inner = config.intermediate_size
        widths = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        return cls(
            gate_up=Linear.build(make, widths, config.hidden_size, config.mlp_bias),
            down=Linear.build(make, {f"{prefix}.down_proj": config.hidden_size}, inner, config.mlp_bias),
        )

    def inner(self, x: Tensor, norm: Tensor, eps: float, kernels: Kernels) -> Tensor:
        """x [tokens, hidden], norm [hidden] -> [tokens, intermediate], which `down` projects back to hidden."""
        return kernels.silu_mul(kernels.norm_linear(x, norm, eps, self.gate_up.weight, self.gate_up.bias))


@dataclass(slots=True)
class Layer:
    input_norm: Tensor  # [hidden]
    attention: SelfAttention
    post_norm: Tensor  # [hidden]
    mlp: MLP

    @classmethod
    def build(cls, make: Parameters, prefix: str, config: ModelConfig, layer: int) -> Layer:
        return cls(
            input_norm=make.tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=SelfAttention.build(make, f"{prefix}.self_attn", config, layer),
            post_norm=make.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            mlp=MLP.build(make, f"{prefix}.mlp", config),
        )
