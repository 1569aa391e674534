"""Experts to whose products each token's adapter adds its part, on a CUDA device."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.experts.many_rows import ManyCut, grouped_product, sort_rows
from aengine.kernels.experts.plan import make_plan
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.gelu import gelu_mul
from aengine.kernels.lora.base import TokenAdapters
from aengine.kernels.lora.experts import ExpertAdapters
from aengine.kernels.lora.pairs import PairFactors, add_pairs
from aengine.kernels.norms import silu_mul


class TritonAdaptedExperts:
    """Without adapters it calls the experts and nothing else; with some, gate and up are written out between products.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(self, experts: TritonExperts, weights: ExpertAdapters, tokens: TokenAdapters) -> None:
        self.experts, self.hidden = experts.experts, experts.hidden
        self._experts = experts
        self._weights = weights  # which the factors point into
        self._gate_up, self._down = PairFactors.of(weights.gate_up), PairFactors.of(weights.down)
        self._tokens = tokens

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        places = self._tokens.places
        if places is None or not len(h):
            return self._experts.add_to(h, ids, weights, residual)
        h, ids, weights, places = h.contiguous(), ids.contiguous(), weights.contiguous(), places.contiguous()
        height, cut = (64, ManyCut(128, 64, 3, 4)) if h.element_size() == 2 else (16, ManyCut(32, 32, 2, 4))
        plan, top_k = make_plan(ids, self.experts, height), ids.shape[1]
        gate_up, down = self._experts.gate_up, self._experts.down
        rows = sort_rows(h, plan, ids)
        both = h.new_empty(len(rows), gate_up.shape[1])
        grouped_product(None, rows, gate_up, plan, both, top_k, height, cut)
        add_pairs(both, rows, self._gate_up, plan, ids, places)
        activated = (gelu_mul if self._experts.rule.gelu else silu_mul)(both)
        grouped_product(None, activated, down, plan, rows, top_k, height, cut)
        add_pairs(rows, activated, self._down, plan, ids, places)
        return weighted_sum(
            rows, ids, weights, None if residual is None else residual.contiguous(), self.experts, plan.places
        )
