"""Causal self-attention with grouped queries."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.heads import Heads
from aengine.kernels.linear.base import Norm
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import AttentionSpec


class Attention:
    """Norm, projection, attention over what the layer keeps in the KV pool, and the projection back onto x."""

    def __init__(
        self, make: Parameters, layer: str, hidden: int, spec: AttentionSpec, eps: float, index: int, last: bool
    ) -> None:
        """layer: its name in checkpoints; index: its place in the KV pool; last: no block behind it attends."""
        self._kernels = make.kernels
        self._norm = make.norm(f"{layer}.input_layernorm", hidden, eps)
        name = f"{layer}.self_attn"
        queries, keys = Part(spec.heads, spec.head_dim), Part(spec.kv_heads, spec.head_dim)
        parts = {f"{name}.q_proj": queries, f"{name}.k_proj": keys, f"{name}.v_proj": keys}
        self._qkv = make.linear(parts, hidden, spec.qkv_bias, split="outputs")
        self._out = make.linear({f"{name}.o_proj": Part(hidden)}, spec.queries, spec.out_bias, split="inputs")
        heads = make.shard.units(spec.heads)
        self._heads = Heads(heads)
        self._dim = spec.head_dim
        self._wide_norms: list[tuple[slice, Norm]] = []  # of columns of the projection
        if spec.qk_norm == "head":
            q_norm, k_norm = (make.tensor(f"{name}.{part}_norm.weight", spec.head_dim) for part in "qk")
            self._heads = Heads(heads, q_norm, k_norm, eps)
        elif spec.qk_norm == "all":
            first, second = heads * spec.head_dim, make.shard.units(spec.kv_heads) * spec.head_dim
            self._wide_norms = [
                (slice(first), make.wide_norm(f"{name}.q_norm", queries, eps)),
                (slice(first, first + second), make.wide_norm(f"{name}.k_norm", keys, eps)),
            ]
        self._kv_scales = make.kv_scales(name)
        self._scale = spec.head_dim**-0.5
        self._window = spec.window
        self._index = index
        self._last = last
        self._sum = make.sum()

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        q, cache, scales = self._queries(x, step), step.kv.layer(self._index), self._kv_scales.loaded
        scale = self._scale * scales.key  # of keys, whatever they are kept as
        attended = step.attention.forward(q, *cache, step.batch, scale, self._window, scales.value).flatten(1)
        if self._last:
            attended, x = step.narrow(attended, x)
            if not len(x):
                return x
        if self._sum is None:
            return self._out.add_to(attended, x)
        return self._sum.of(lambda rows: self._out(attended[rows]), x)

    def _queries(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, heads, dim]; keys and values go where the step says."""
        pieces = step.pieces(len(x))
        if len(pieces) == 1:
            return self._project(x, step, step.positions, step.batch.slots)
        q = x.new_empty(len(x), self._heads.count, self._dim)
        for rows in pieces:
            self._project(x[rows], step, step.positions[rows], step.batch.slots[rows], q[rows])
        return q

    def _project(self, x: Tensor, step: Step, positions: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
        qkv = self._qkv.after(self._norm, x)
        for columns, norm in self._wide_norms:
            qkv[:, columns] = norm(qkv[:, columns])
        cache, scales = step.kv.layer(self._index), self._kv_scales.loaded
        return self._kernels.qk_norm_rope_store(qkv, self._heads, step.cos_sin, positions, cache, slots, scales, out)
