"""The feed-forward part of a layer with both an MLP and a mixture of experts."""

from __future__ import annotations

from torch import Tensor

from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.mlp import GatedMLP
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.spec.feed_forward import MLPAndExpertsSpec
from aengine.model.spec.layer import LayerSpec


class MLPAndExperts:
    """An MLP and experts that both read x. Their results are normed, added up, normed again and added to x.

    The MLP, the experts and the router each have a norm of their own. The checkpoint has a factor for each expert.
    """

    def __init__(self, build: BuildContext, name: str, layer: LayerSpec, spec: MLPAndExpertsSpec) -> None:
        """name: the layer's name in checkpoints."""
        norms, experts = layer.norms, spec.experts
        make, hidden, eps = build.make, build.hidden, build.eps
        self._mlp = GatedMLP(build, name, norms.before_ffn, spec.mlp)
        self._mlp_sum = make.sum(prepares=False)
        self._mlp_norm = make.norm(f"{name}.post_feedforward_layernorm_1", hidden, eps)
        self._router_norm = make.scaled_norm(f"{name}.router.scale", hidden, hidden**-0.5, eps)
        self._route = make.route(name, hidden, experts)
        self._factors = make.tensor(f"{name}.router.per_expert_scale", experts.count)
        self._before = make.norm(f"{name}.pre_feedforward_layernorm_2", hidden, eps)
        self._experts = make.experts(f"{name}.experts", hidden, experts)
        self._experts_sum = make.sum(prepares=False)
        self._experts_norm = make.norm(f"{name}.post_feedforward_layernorm_2", hidden, eps)
        norm = make.layer_norm(name, norms.after_ffn, hidden)
        self._add = Addition(None, norm, layer.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        first = self._mlp(x)
        _, ids, weights = self._route.after(self._router_norm, x, step.slots(len(x)), step.kv.page_size)
        weights = weights * self._factors[ids.clamp_min(0).long()]  # padding has no expert
        second = self._experts.add_to(self._before(x), ids, weights, None)
        if self._mlp_sum is not None and self._experts_sum is not None:
            first, second = self._mlp_sum(first), self._experts_sum(second)
        whole = self._experts_norm.add_to(second, self._mlp_norm(first))
        return self._add.add_result(whole.__getitem__, x)
