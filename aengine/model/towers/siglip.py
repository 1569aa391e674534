"""The tower of Gemma 3: SigLIP, whose patches are averaged over the square of a token and projected."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from aengine.model.images.spec import ImageSpec
from aengine.model.images.tower_specs import SiglipTower
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.towers.base import Embedding, ImageEmbeddings, PatchBatch, Tower
from aengine.model.towers.parts import LayerNorm, PatchEmbedding, TowerOps, TwoLayers


class SiglipVision(Tower):
    def __init__(self, make: Parameters, spec: ImageSpec, tower: SiglipTower, ops: TowerOps) -> None:
        self.blocks = tower.layers
        hidden, embeddings = tower.hidden, "vision_tower.embeddings"
        self._embed = PatchEmbedding(make, f"{embeddings}.patch_embedding", hidden, spec.patch, True)
        self._table = make.tensor(f"{embeddings}.position_embedding.weight", tower.side**2, hidden)
        self._side, self._area = tower.side, spec.merge**2
        self._blocks = [_Block(make, f"vision_tower.encoder.layers.{i}", tower, ops) for i in range(tower.layers)]
        self._norm = LayerNorm(make, "vision_tower.post_layernorm", hidden, tower.eps)
        norm = make.norm_weight("multi_modal_projector.mm_soft_emb_norm", Part(1, hidden), 1.0)
        self._soft_norm = make.kernels.norm(norm, tower.eps)
        # Stored with inputs before outputs.
        self._projection = make.tensor("multi_modal_projector.mm_input_projection_weight", hidden, tower.out)

    def begin(self, batch: PatchBatch, rehearsal: bool = False) -> Embedding:
        places = batch.places
        x = self._embed(batch.rows) + F.embedding(places[:, 0] * self._side + places[:, 1], self._table)
        for block in self._blocks[: 1 if rehearsal else None]:
            x = block(x, batch.lengths)
            yield
        pooled = self._norm(x).unflatten(0, (-1, self._area)).mean(1)
        return ImageEmbeddings(self._soft_norm(pooled) @ self._projection)


class _Block:
    def __init__(self, make: Parameters, name: str, tower: SiglipTower, ops: TowerOps) -> None:
        self._ops = ops
        hidden = tower.hidden
        self._heads, self._scale = tower.heads, (hidden // tower.heads) ** -0.5
        self._norm1 = LayerNorm(make, f"{name}.layer_norm1", hidden, tower.eps)
        self._norm2 = LayerNorm(make, f"{name}.layer_norm2", hidden, tower.eps)
        parts = {f"{name}.self_attn.{one}_proj": Part(hidden) for one in "qkv"}
        self._qkv = make.linear(parts, hidden, bias=True)
        self._out = make.linear({f"{name}.self_attn.out_proj": Part(hidden)}, hidden, bias=True)
        self._mlp = TwoLayers(
            make, (f"{name}.mlp.fc1", f"{name}.mlp.fc2"), (hidden, tower.inner, hidden), tower.activation
        )

    def __call__(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        q, k, v = self._qkv.apply(self._norm1(x)).unflatten(1, (3, self._heads, -1)).unbind(1)
        x = self._out.apply(self._ops.attend(q, k, v, lengths, self._scale), residual=x)
        return self._mlp(self._norm2(x), residual=x)
