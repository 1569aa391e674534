"""The feed-forward part of a layer with an MLP and a mixture of experts side by side."""

from __future__ import annotations

from torch import Tensor

from aengine.model.blocks.ends import Addition
from aengine.model.blocks.mlp import GatedProducts
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.spec import LayerSpec, MLPAndExpertsSpec


class MLPAndExperts:
    """Both take x, each behind a norm of its own; what they give is normed each, added up, normed again and added to x.

    The router has a norm of its own as well, and each expert a factor of the checkpoint.
    """

    def __init__(
        self, make: Parameters, layer: str, hidden: int, layer_spec: LayerSpec, spec: MLPAndExpertsSpec, eps: float
    ) -> None:
        """layer: its name in checkpoints."""
        norms, experts = layer_spec.norms, spec.experts
        self._mlp = GatedProducts(make, layer, hidden, norms.before_ffn, spec.mlp, eps)
        self._mlp_sum = make.sum(prepares=False)
        self._mlp_norm = make.norm(f"{layer}.post_feedforward_layernorm_1", hidden, eps)
        self._router_norm = make.scaled_norm(f"{layer}.router.scale", hidden, hidden**-0.5, eps)
        self._route = make.route(f"{layer}.router.proj", hidden, experts)
        self._factors = make.tensor(f"{layer}.router.per_expert_scale", experts.count)
        self._before = make.norm(f"{layer}.pre_feedforward_layernorm_2", hidden, eps)
        self._experts = make.experts(f"{layer}.experts", hidden, experts)
        self._experts_sum = make.sum(prepares=False)
        self._experts_norm = make.norm(f"{layer}.post_feedforward_layernorm_2", hidden, eps)
        norm = make.optional_norm(layer, norms.after_ffn, hidden, eps)
        self._add = Addition(None, norm, layer_spec.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        first = self._mlp(x)
        _, ids, weights = self._route.after(self._router_norm, x, step.slots(len(x)), step.kv.page_size)
        weights = weights * self._factors[ids.clamp_min(0).long()]  # padding has no expert
        second = self._experts.add_to(self._before(x), ids, weights, None)
        if self._mlp_sum is not None and self._experts_sum is not None:
            first, second = self._mlp_sum(first), self._experts_sum(second)
        whole = self._experts_norm.add_to(second, self._mlp_norm(first))
        return self._add.of(whole.__getitem__, x)
