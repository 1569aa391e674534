"""The tower of Gemma 4: norms around attention and MLP, clipped linears, and tokens that average their patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.images.spec import ImageSpec
from aengine.model.images.tower_specs import Gemma4Tower
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.towers.base import Embedding, ImageEmbeddings, PatchBatch, Tower
from aengine.model.towers.parts import TowerOps, activate, angles_of, frequencies


class Gemma4Vision(Tower):
    def __init__(self, make: Parameters, spec: ImageSpec, tower: Gemma4Tower, ops: TowerOps) -> None:
        self.blocks = tower.layers
        hidden, embedder = tower.hidden, "vision_tower.patch_embedder"
        self._embed = make.linear({f"{embedder}.input_proj": Part(hidden)}, 3 * spec.patch**2)
        self._tables = make.tensor(f"{embedder}.position_embedding_table", 2, tower.positions, hidden)
        own = frequencies(tower.theta, tower.head_dim // 2, make.device)
        self._frequencies = own, own
        self._blocks = [_Block(make, f"vision_tower.encoder.layers.{i}", tower, ops) for i in range(tower.layers)]
        self._area, self._root, self._eps = spec.merge**2, hidden**0.5, tower.eps
        self._shift = make.tensor("vision_tower.std_bias", hidden) if tower.standardised else None
        self._factor = make.tensor("vision_tower.std_scale", hidden) if tower.standardised else None
        self._project = make.linear({"embed_vision.embedding_projection": Part(tower.out)}, hidden)

    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        # The matrix has the three channels of a pixel next to each other.
        rows = (2 * (batch.rows - 0.5)).unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
        row, column = batch.places[:, 0], batch.places[:, 1]
        x = self._embed.apply(rows) + F.embedding(column, self._tables[0]) + F.embedding(row, self._tables[1])
        cos, sin = angles_of(batch.places[:, :2].flip(1), self._frequencies)
        angles = cos.view(len(cos), 2, -1), sin.view(len(sin), 2, -1)  # a half of each head for columns, one for rows
        for block in self._blocks[: 1 if rehearsal else None]:
            x = block(x, angles, batch.lengths)
            yield
        pooled = x.float().unflatten(0, (-1, self._area)).mean(1).to(x.dtype).float() * self._root
        if self._shift is not None and self._factor is not None:
            pooled = (pooled - self._shift.float()) * self._factor.float()
        pooled = pooled.to(x.dtype)
        return ImageEmbeddings(self._project.apply(_rms(pooled, None, self._eps)))


class _Block:
    def __init__(self, make: Parameters, name: str, tower: Gemma4Tower, ops: TowerOps) -> None:
        self._ops = ops
        hidden, dim, attn = tower.hidden, tower.head_dim, f"{name}.self_attn"
        self._eps, self._dim, self._repeats = tower.eps, dim, tower.heads // tower.kv_heads
        norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        self._norms = [make.norm_weight(f"{name}.{norm}", Part(1, hidden)) for norm in norms]
        self._q_norm, self._k_norm = (make.norm_weight(f"{attn}.{one}_norm", Part(1, dim)) for one in "qk")
        queries, keys = tower.heads * dim, tower.kv_heads * dim
        self._q = _Clipped(make, f"{attn}.q_proj", hidden, queries, tower.clipped)
        self._k = _Clipped(make, f"{attn}.k_proj", hidden, keys, tower.clipped)
        self._v = _Clipped(make, f"{attn}.v_proj", hidden, keys, tower.clipped)
        self._out = _Clipped(make, f"{attn}.o_proj", queries, hidden, tower.clipped)
        self._gate = _Clipped(make, f"{name}.mlp.gate_proj", hidden, tower.inner, tower.clipped)
        self._up = _Clipped(make, f"{name}.mlp.up_proj", hidden, tower.inner, tower.clipped)
        self._down = _Clipped(make, f"{name}.mlp.down_proj", tower.inner, hidden, tower.clipped)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: tuple[int, ...]) -> Tensor:
        before, after, before_mlp, after_mlp = self._norms
        h = _rms(x, before, self._eps)
        q, k, v = (linear(h).unflatten(1, (-1, self._dim)) for linear in (self._q, self._k, self._v))
        q, k = (self._turned(one, norm, angles) for one, norm in ((q, self._q_norm), (k, self._k_norm)))
        v = _rms(v, None, self._eps)
        if self._repeats > 1:
            k, v = (one.repeat_interleave(self._repeats, dim=1) for one in (k, v))
        x = x + _rms(self._out(self._ops.attend(q, k, v, lengths, 1.0)), after, self._eps)
        h = _rms(x, before_mlp, self._eps)
        h = self._down(activate(self._gate(h), "gelu_tanh") * self._up(h))
        return x + _rms(h, after_mlp, self._eps)

    def _turned(self, heads: Tensor, norm: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return self._ops.rotate(_rms(heads, norm, self._eps), *angles)


class _Clipped:
    """A linear whose inputs and outputs are clipped to ranges that the checkpoint has."""

    def __init__(self, make: Parameters, name: str, inputs: int, outputs: int, clipped: bool) -> None:
        self._linear = make.linear({f"{name}.linear": Part(outputs)}, inputs)
        names = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
        self._bounds = [make.tensor(f"{name}.{one}") for one in names]

    def __call__(self, x: Tensor) -> Tensor:
        if not self._bounds:
            return self._linear.apply(x)
        low, high, out_low, out_high = self._bounds
        return torch.clamp(self._linear.apply(torch.clamp(x, low, high)), out_low, out_high)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm over the last axis. The weight is applied in float32. None: there is none."""
    return F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), eps).to(x.dtype)
