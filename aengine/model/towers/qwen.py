"""The tower of Qwen3-VL and Qwen3.5: pre-norm blocks, positions from an interpolated table and from a rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.images.spec import ImageSpec
from aengine.model.images.tower_specs import QwenTower
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.towers.base import Embedding, ImageEmbeddings, PatchBatch, Tower
from aengine.model.towers.parts import (
    LayerNorm,
    PatchEmbedding,
    TowerOps,
    TwoLayers,
    angles_of,
    frequencies,
)

_EPS = 1e-6


class QwenVision(Tower):
    def __init__(self, make: Parameters, spec: ImageSpec, tower: QwenTower, ops: TowerOps) -> None:
        self.blocks = tower.layers
        self._embed = PatchEmbedding(make, "visual.patch_embed.proj", tower.hidden, spec.patch, True, tower.frames)
        self._table = make.tensor("visual.pos_embed.weight", tower.side**2, tower.hidden)
        self._side = tower.side
        own = frequencies(tower.theta, tower.hidden // tower.heads // 2, make.device)
        self._frequencies = own, own
        self._blocks = [_Block(make, f"visual.blocks.{i}", tower, ops) for i in range(tower.layers)]
        self._merger = _Merger(make, "visual.merger", spec.merge**2, tower)
        mergers = (f"visual.deepstack_merger_list.{i}" for i in range(len(tower.deep)))
        deep = [_Merger(make, name, spec.merge**2, tower, norm_merged=True) for name in mergers]
        self._deep = dict(zip(tower.deep, deep))

    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        x = self._embed(batch.rows) + interpolated(self._table, self._side, batch.places)
        angles = angles_of(batch.places, self._frequencies)
        deep: dict[int, Tensor] = {}
        for i, block in enumerate(self._blocks):
            merger = self._deep.get(i)
            if rehearsal and i and merger is None:
                continue
            x = block(x, angles, batch.lengths)
            if merger is not None:
                deep[i] = merger(x)
            yield
        return ImageEmbeddings(self._merger(x), tuple(deep[i] for i in sorted(deep)))


class _Block:
    def __init__(self, make: Parameters, name: str, tower: QwenTower, ops: TowerOps) -> None:
        hidden = tower.hidden
        self._ops = ops
        self._heads, self._scale = tower.heads, (hidden // tower.heads) ** -0.5
        self._norm1 = LayerNorm(make, f"{name}.norm1", hidden, _EPS)
        self._norm2 = LayerNorm(make, f"{name}.norm2", hidden, _EPS)
        self._qkv = make.linear({f"{name}.attn.qkv": Part(3 * hidden)}, hidden, bias=True)
        self._out = make.linear({f"{name}.attn.proj": Part(hidden)}, hidden, bias=True)
        names = f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"
        self._mlp = TwoLayers(make, names, (hidden, tower.inner, hidden), tower.activation)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: tuple[int, ...]) -> Tensor:
        heads = self._qkv.apply(self._norm1(x)).unflatten(1, (3 * self._heads, -1))
        q, k = self._ops.rotate(heads[:, : 2 * self._heads], *angles).chunk(2, dim=1)
        attended = self._ops.attend(q, k, heads[:, 2 * self._heads :], lengths, self._scale)
        x = self._out.apply(attended, residual=x)
        return self._mlp(self._norm2(x), residual=x)


class _Merger:
    """Makes one row of the patches of a token, and projects it to the decoder's hidden size."""

    def __init__(self, make: Parameters, name: str, patches: int, tower: QwenTower, norm_merged: bool = False) -> None:
        """patches: of a token. norm_merged: whether the norm is over all of them together."""
        self._width = patches * tower.hidden
        self._norm = LayerNorm(make, f"{name}.norm", self._width if norm_merged else tower.hidden, _EPS)
        self._norm_merged = norm_merged
        names = f"{name}.linear_fc1", f"{name}.linear_fc2"
        self._mlp = TwoLayers(make, names, (self._width, self._width, tower.out), "gelu")

    def __call__(self, x: Tensor) -> Tensor:
        x = self._norm(x.view(-1, self._width)) if self._norm_merged else self._norm(x).view(-1, self._width)
        return self._mlp(x)


def interpolated(table: Tensor, side: int, places: Tensor) -> Tensor:
    """Return the embedding of each patch's position: the table, stretched to the image's grid, [patches, hidden].

    table: [side * side, hidden], row by row. Its corners are those of the image. places: of `PatchBatch`.
    """
    at = places[:, :2].float() * (side - 1) / (places[:, 2:] - 1).clamp(min=1)
    low = at.floor()
    part = at - low
    near = low.long()
    far = (near + 1).clamp(max=side - 1)
    total = torch.zeros(len(places), table.shape[1], device=table.device)
    for rows, of_rows in ((near[:, 0], 1 - part[:, 0]), (far[:, 0], part[:, 0])):
        for columns, of_columns in ((near[:, 1], 1 - part[:, 1]), (far[:, 1], part[:, 1])):
            total += F.embedding(rows * side + columns, table) * (of_rows * of_columns).unsqueeze(1)
    return total.to(table.dtype)
