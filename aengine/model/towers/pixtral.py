"""The tower of Mistral 3: Pixtral, whose patches are merged by a matrix and projected."""

from __future__ import annotations

from torch import Tensor

from aengine.model.images.spec import ImageSpec
from aengine.model.images.tower_specs import PixtralTower
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.towers.base import Embedding, ImageEmbeddings, PatchBatch, Tower
from aengine.model.towers.parts import (
    PatchEmbedding,
    TowerOps,
    TwoLayers,
    activate,
    angles_of,
    frequencies,
)

_EPS = 1e-5


class PixtralVision(Tower):
    def __init__(self, make: Parameters, spec: ImageSpec, tower: PixtralTower, ops: TowerOps) -> None:
        self.blocks = tower.layers
        hidden, projector = tower.hidden, "multi_modal_projector"
        self._embed = PatchEmbedding(make, "vision_tower.patch_conv", hidden, spec.patch, False)
        self._first_norm = make.norm("vision_tower.ln_pre", hidden, _EPS)
        every = frequencies(tower.theta, hidden // tower.heads, make.device)
        self._frequencies = every[0::2], every[1::2]  # of rows, and of columns
        names = (f"vision_tower.transformer.layers.{i}" for i in range(tower.layers))
        self._blocks = [_Block(make, name, tower, ops) for name in names]
        self._norm = make.norm(f"{projector}.norm", hidden, tower.projection_eps)
        self._area = spec.merge**2
        merging = {f"{projector}.patch_merger.merging_layer": Part(hidden)}
        self._merge = make.linear(merging, self._area * hidden)
        self._project = TwoLayers(
            make,
            (f"{projector}.linear_1", f"{projector}.linear_2"),
            (hidden, tower.out, tower.out),
            tower.projection_activation,
            tower.projection_bias,
        )

    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        x = self._first_norm(self._embed(batch.rows))
        angles = angles_of(batch.places, self._frequencies)
        for block in self._blocks[: 1 if rehearsal else None]:
            x = block(x, angles, batch.lengths)
            yield
        merged = self._norm(x).unflatten(0, (-1, self._area)).transpose(1, 2).flatten(1)  # by channel, then by patch
        return ImageEmbeddings(self._project(self._merge.apply(merged)))


class _Block:
    def __init__(self, make: Parameters, name: str, tower: PixtralTower, ops: TowerOps) -> None:
        hidden, inner = tower.hidden, tower.inner
        self._ops = ops
        self._heads, self._scale, self._kind = tower.heads, (hidden // tower.heads) ** -0.5, tower.activation
        self._norm1 = make.norm(f"{name}.attention_norm", hidden, _EPS)
        self._norm2 = make.norm(f"{name}.ffn_norm", hidden, _EPS)
        self._qkv = make.linear({f"{name}.attention.{one}_proj": Part(hidden) for one in "qkv"}, hidden)
        self._out = make.linear({f"{name}.attention.o_proj": Part(hidden)}, hidden)
        self._gate_up = make.linear({f"{name}.feed_forward.{one}_proj": Part(inner) for one in ("gate", "up")}, hidden)
        self._down = make.linear({f"{name}.feed_forward.down_proj": Part(hidden)}, inner)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: tuple[int, ...]) -> Tensor:
        heads = self._qkv.apply(x, norm=self._norm1).unflatten(1, (3 * self._heads, -1))
        q, k = self._ops.rotate(heads[:, : 2 * self._heads], *angles).chunk(2, dim=1)
        attended = self._ops.attend(q, k, heads[:, 2 * self._heads :], lengths, self._scale)
        x = self._out.apply(attended, residual=x)
        gate, up = self._gate_up.apply(x, norm=self._norm2).chunk(2, dim=-1)
        return self._down.apply(activate(gate, self._kind) * up, residual=x)
