"""Layers with several residual streams (Gemma 3n): AltUp, with LAuReL next to attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.step import Step
from aengine.model.blocks.variants.layer_inputs import LayerInput
from aengine.model.ranks.shard import Part
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import AltUpSpec, LayerSpec

_LEAST = 1e-5  # of the mean square that a stream is divided by


class AltUpLayer:
    """Predicts all streams, computes one by attention and an MLP, and corrects all by the result.

    The layer's part of the second embedding is added to all streams but the first. Every rank has all spec.
    """

    def __init__(
        self,
        build: BuildContext,
        name: str,
        layer: LayerSpec,
        spec: AltUpSpec,
        layer_kv: LayerKV,
        index: int,
        last: bool,
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        layer_kv: The keys and values that the layer reads, which may be another layer's.
        index: The number of the layer.
        last: Whether no later layer attends.
        """
        if not (isinstance(layer.attention, AttentionSpec) and isinstance(layer.ffn, MLPSpec) and layer.input_width):
            raise ValueError("a layer of several streams needs attention, an MLP and a second embedding")
        make, hidden, prefix = build.make, build.hidden, f"{name}.altup"
        self._active = spec.active
        self._last = last
        self._split = _Split(build, spec.count) if spec.first else None
        self._router_norm = make.scaled_norm(f"{prefix}.router_norm.weight", hidden, 1 / hidden, build.eps)
        self._router = make.tensor(f"{prefix}.modality_router.weight", spec.count, hidden)
        self._prediction = make.tensor(f"{prefix}.prediction_coefs.weight", spec.count**2, spec.count)
        self._correction = make.tensor(f"{prefix}.correction_coefs.weight", spec.count, spec.count)
        scale = make.tensor(f"{prefix}.correct_output_scale", hidden)
        self._scale = scale if spec.scaled else None
        self._norm = make.layer_norm(name, layer.norms.before_attention, hidden)
        self._left = make.linear({f"{name}.laurel.linear_left": Part(spec.rank)}, hidden)
        self._right = make.linear({f"{name}.laurel.linear_right": Part(hidden)}, spec.rank)
        self._laurel_norm = make.norm(f"{name}.laurel.post_laurel_norm", hidden, build.eps)
        without = replace(layer, norms=replace(layer.norms, before_attention=None))
        self._attention = Attention(build, name, without, layer.attention, layer_kv, last)
        self._mlp = MLP(build, name, layer, layer.ffn)
        self._input = LayerInput(build, name, layer, index)
        self._merge = _Merge(build, spec.count) if spec.last else None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, streams, hidden] -> the same. The first layer reads [tokens, hidden], and the last returns it."""
        predicted = self._predict(x if self._split is None else self._split(x))
        active = predicted[:, self._active].clone(memory_format=torch.contiguous_format)
        h = active if self._norm is None else self._norm(active)
        added = self._laurel_norm(self._right.apply(self._left.apply(h))).add_(h)
        y = self._attention.attend_and_add(h, active, step)
        if self._last and step.wanted is not None:  # attention has returned only these tokens
            predicted, added = predicted.index_select(0, step.wanted), added.index_select(0, step.wanted)
        if not len(y):
            return y
        y = self._mlp(y.add_(added).mul_(2.0**-0.5), step)
        x = self._correct(predicted, y, step)
        return x if self._merge is None else self._merge(x)

    def _predict(self, x: Tensor) -> Tensor:
        """Return x plus a mixture of its streams for each stream. x: [tokens, streams, hidden]."""
        mixtures = F.linear(self._modalities(x[:, self._active]), self._prediction)
        return torch.baddbmm(x, mixtures.unflatten(1, (x.shape[1], x.shape[1])), x)

    def _correct(self, predicted: Tensor, y: Tensor, step: Step) -> Tensor:
        """Return the streams [tokens, streams, hidden] after a layer whose active stream should be y [tokens, hidden].

        predicted: all streams, which are overwritten.
        """
        factors = F.linear(self._modalities(y), self._correction).add_(1.0)  # [tokens, streams]
        difference = y - predicted[:, self._active]
        x = predicted.addcmul_(difference.unsqueeze(1), factors.unsqueeze(2))
        active = x[:, self._active]
        inputs = active.contiguous() if self._scale is None else active * self._scale
        x[:, 1:].add_(self._input.result(inputs, step).unsqueeze(1))
        return x

    def _modalities(self, x: Tensor) -> Tensor:
        """Return the numbers that the coefficients of a token depend on, [tokens, streams]. x: [tokens, hidden]."""
        return F.linear(self._router_norm(x.contiguous()), self._router).float().tanh().to(x.dtype)


class _Split:
    """Makes all streams from the embedding: itself, and projections of it with the same magnitude."""

    def __init__(self, build: BuildContext, streams: int) -> None:
        names = [f"model.altup_projections.{i}" for i in range(streams - 1)]
        self._others = build.make.linear({name: Part(build.hidden) for name in names}, build.hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, streams, hidden]."""
        first = x.unsqueeze(1)
        others = self._others.apply(x).unflatten(1, (-1, x.shape[1]))
        return torch.cat((first, _with_magnitude(others, first)), dim=1)


class _Merge:
    """Returns the mean of the first stream and of projections of the others with the first one's magnitude."""

    def __init__(self, build: BuildContext, streams: int) -> None:
        names = [f"model.altup_unembed_projections.{i}" for i in range(streams - 1)]
        self._others = [build.make.linear({name: Part(build.hidden)}, build.hidden) for name in names]

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, streams, hidden] -> [tokens, hidden]."""
        others = [linear.apply(x[:, 1 + i].contiguous()) for i, linear in enumerate(self._others)]
        first = x[:, :1]
        return torch.cat((first, _with_magnitude(torch.stack(others, dim=1), first)), dim=1).mean(dim=1)


def _with_magnitude(x: Tensor, other: Tensor) -> Tensor:
    """Return x, scaled so that the mean square of each row is that of the row of `other`. Both: [..., hidden]."""
    own = x.float().square().mean(-1, keepdim=True).clamp_min(_LEAST)
    wanted = other.float().square().mean(-1, keepdim=True)
    return (x * (wanted / own).sqrt()).to(x.dtype)
