"""Experts on a CUDA device, whatever the format of their matrices: plan, gate and up, down, weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aengine.kernels.experts.base import ExpertPass, ExpertProducts
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.launch import launch_for


class TritonExperts:
    """Enqueues everything on the current stream; use one stream at a time."""

    def __init__(self, products: ExpertProducts[Any, Any]) -> None:
        self.products = products
        self.experts, self.hidden = products.experts, products.hidden

    @property
    def rule(self) -> ExpertRule:
        return self.products.rule

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"gate_up": self.products.gate_up, "down": self.products.down, "rule": self.products.rule}

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        single = self.products.single_config(tokens, top_k, h.dtype, launch_for(h.device))
        if single is not None:
            return self.products.single_rows(h, ids, weights, residual, single)
        one = self.begin(h, ids)
        rows = one.down(one.activated())
        return weighted_sum(rows, ids, weights, residual, self.experts, one.plan.places if one.sorted else None)

    def begin(self, h: Tensor, ids: Tensor) -> ExpertPass:
        """Sort the pairs of a pass. h [tokens, hidden], ids int32 [tokens, k], both contiguous."""
        tokens, top_k = ids.shape
        config = self.products.tile_config(tokens, top_k, h.dtype, launch_for(h.device))
        plan = make_plan(ids, self.experts, config.height)
        return self.products.begin(h, ids, plan, config)
