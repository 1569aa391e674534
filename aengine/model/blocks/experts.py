"""The feed-forward part of a layer with a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.mlp import activate, gate_up_parts
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.slots import ExpertsSlot
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import LayerSpec


class MixtureOfExperts:
    """Norm, the choice of some experts for each token, and the addition of their weighted results to x."""

    def __init__(self, build: BuildContext, name: str, layer: LayerSpec, spec: ExpertsSpec) -> None:
        """name: the layer's name in checkpoints."""
        make, hidden, block = build.make, build.hidden, f"{name}.{spec.block}"
        self._norm = make.layer_norm(name, layer.norms.before_ffn, hidden)
        self._route = make.route(block, hidden, spec)
        self._latent = _LatentProjections(build, block, spec.latent) if spec.latent else None
        self._experts = make.experts(f"{block}.experts", spec.latent or hidden, spec)
        self._shared = None if spec.shared is None else SharedExpert(build, name if spec.shared_beside else block, spec)
        self._add = Addition.of_block(build, name, layer.norms.after_ffn, layer.residual_scale)
        self._weighs_inputs = spec.weighs_inputs
        # Without a norm the experts read x itself. Then x must not change before they have read it.
        self._adds_in_place = self._add.is_fused and self._norm is not None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        h, ids, weights = self._route.after(self._norm, x, step.slots(len(x)), step.kv.page_size)
        experts: Experts = self._experts
        shared, routed = self._shared, h
        if self._weighs_inputs:
            routed, weights = h * weights.to(h.dtype), torch.ones_like(weights)
        elif shared is not None and self._latent is None:
            fused = shared.fuse_with(self._experts, h, ids.shape[1])
            experts, shared = (experts, shared) if fused is None else (fused, None)
        if self._latent is not None:
            whole = self._latent.up(experts.add_to(self._latent.down(h), ids, weights, None))
            whole = whole if shared is None else shared.add_to(h, whole)
            return self._add.add_result(whole.__getitem__, x)
        if self._adds_in_place:
            if shared is not None:
                x = shared.add_to(h, x)
            return experts.add_to(routed, ids, weights, x)
        part = None if shared is None else shared(h)
        part = experts.add_to(routed, ids, weights, part)
        return self._add.add_result(part.__getitem__, x)


class _LatentProjections:
    """Projections of tokens to a narrower width, in which experts compute, and back. Every rank has them whole."""

    def __init__(self, build: BuildContext, block: str, width: int) -> None:
        self._down = build.make.linear({f"{block}.fc1_latent_proj": Part(width)}, build.hidden)
        self._up = build.make.linear({f"{block}.fc2_latent_proj": Part(build.hidden)}, width)

    def down(self, h: Tensor) -> Tensor:
        """h [tokens, hidden] -> [tokens, width]."""
        return self._down.apply(h)

    def up(self, part: Tensor) -> Tensor:
        """part [tokens, width], of this rank's experts -> [tokens, hidden]."""
        return self._up.apply(part)


class SharedExpert:
    """The expert that every token passes. A gate may weight its result.

    With several ranks, each rank returns a partial sum.
    """

    def __init__(self, build: BuildContext, block: str, spec: ExpertsSpec) -> None:
        """block: the name in checkpoints of the block that has the shared expert."""
        if spec.shared is None:
            raise ValueError("there is no shared expert")
        make, hidden, name = build.make, build.hidden, f"{block}.{spec.shared_name}"
        self._kernels = make.kernels
        shared = spec.shared
        self._gate_up = make.linear(gate_up_parts(name, shared), hidden, shared.bias, split="outputs")
        down = {f"{name}.{shared.down}": Part(hidden)}
        self._down = make.linear(down, shared.inner, shared.bias, split="inputs")
        self._activation = None if shared.gated else shared.activation
        self._gate = make.shared_gate(f"{name}_gate", hidden) if spec.shared_gate else None
        self._adapters = None if make.adapters is None else make.adapters.tokens

    def __call__(self, h: Tensor) -> Tensor:
        """h [tokens, hidden], normed -> [tokens, hidden]."""
        return self._down.apply(self._inner(h))

    def add_to(self, h: Tensor, x: Tensor) -> Tensor:
        """Return x [tokens, hidden] plus the result."""
        return self._down.apply(self._inner(h), residual=x)

    def fuse_with(self, experts: ExpertsSlot, h: Tensor, top_k: int) -> Experts | None:
        """Return experts that also compute this expert, in the same launches. None: it needs separate launches.

        h [tokens, hidden]: the input; each token goes to top_k experts.
        """
        # The kernels number the experts from 0.
        if experts.first or self._adapted or self._activation is not None:
            return None
        gate_up, down = self._gate_up.unadapted, self._down.unadapted
        if experts.unadapted is None or gate_up is None or down is None:
            return None
        row = None if self._gate is None else self._gate[0]
        return self._kernels.with_shared(experts.unadapted, gate_up, down, row, h, top_k)

    @property
    def _adapted(self) -> bool:
        """Whether a token of the step has an adapter."""
        return self._adapters is not None and self._adapters.places is not None

    def _inner(self, h: Tensor) -> Tensor:
        if self._activation is not None:
            return activate(self._activation, self._gate_up.apply(h))
        if self._gate is None:
            return self._kernels.silu_mul(self._gate_up.apply(h))  # [tokens, inner]
        # The down product has no bias, so the gate may be applied before it.
        row, linear = self._gate
        if not self._adapted:
            return self._kernels.gated_silu_mul(self._gate_up.apply(h), h, row)
        return self._kernels.silu_mul(self._gate_up.apply(h)).mul_(linear.apply(h).sigmoid_())
