"""Attention whose value heads are narrower than its key heads (MiMo-V2-Flash).

The KV pool and the kernels have one width for both. So zeros follow each value, and are cut off after attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Norm
from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.slots import LinearSlot
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.layer import LayerSpec


class NarrowValuesAttention(Attention):
    """Like `Attention`, with zeros after each value head."""

    def __init__(
        self, build: BuildContext, name: str, layer: LayerSpec, spec: AttentionSpec, layer_kv: LayerKV, last: bool
    ) -> None:
        super().__init__(build, name, layer, spec, layer_kv, last)
        width, dim = spec.head_dim, spec.value_dim or spec.head_dim
        values = build.make.shard.units(spec.kv_heads) * dim
        project, out = self._qkv, self._out

        def apply_padded(x: Tensor, *, norm: Norm | None = None) -> Tensor:
            before, after = project.apply(x, norm=norm).tensor_split((-values,), dim=1)
            heads = after.unflatten(1, (-1, dim)) * spec.value_scale
            return torch.cat((before, F.pad(heads, (0, width - dim)).flatten(1)), dim=1)

        def apply_cut(x: Tensor, *, residual: Tensor | None = None) -> Tensor:
            return out.apply(x.unflatten(1, (-1, width))[..., :dim].flatten(1), residual=residual)

        self._qkv = LinearSlot(project.inputs, project.outputs + values // dim * (width - dim))
        self._out = LinearSlot(out.inputs // dim * width, out.outputs)
        self._qkv.apply, self._out.apply = apply_padded, apply_cut
