"""Experts to whose products each token's adapter adds its part, on a CUDA device."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.experts.apart import ApartExperts
from aengine.kernels.lora.base import TokenAdapters
from aengine.kernels.lora.experts import ExpertAdapters
from aengine.kernels.lora.pairs import PairFactors, shrink_pairs
from aengine.kernels.lora.pairs_gated import gate_pairs
from aengine.kernels.lora.pairs_sum import sum_pairs


class TritonAdaptedExperts:
    """Experts of any format: without adapters they are called and nothing else; with some, gate and up are written out
    by their products, and what adapters add comes with the activation and with the sum.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(self, experts: ApartExperts, weights: ExpertAdapters, tokens: TokenAdapters) -> None:
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
        residual = None if residual is None else residual.contiguous()
        apart = self._experts.apart(h, ids)
        both = apart.gate_up()
        first = shrink_pairs(h, self._gate_up, apart, ids, places, of_tokens=True)
        inner = gate_pairs(both, first, self._gate_up, self._experts.rule, apart, ids, places)
        rows = apart.down(inner)
        second = shrink_pairs(inner, self._down, apart, ids, places, of_tokens=False)
        return sum_pairs(rows, second, self._down, apart, ids, weights, places, residual)
