"""Experts to whose products each token's adapter adds its part, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.experts.torch_experts import TorchExperts
from aengine.kernels.lora.base import AdapterWeights, TokenAdapters
from aengine.kernels.lora.torch_adapted import add_present


@dataclass(slots=True, eq=False)
class ExpertAdapters:
    """The adapters of a layer's experts, with factors of their own for each expert, as `AdapterWeights` has them."""

    gate_up: list[AdapterWeights]  # of each expert; two parts
    down: list[AdapterWeights]


class TorchAdaptedExperts:
    """Without adapters it calls the experts and nothing else. It asks the device which experts have tokens."""

    def __init__(self, experts: TorchExperts, weights: ExpertAdapters, tokens: TokenAdapters) -> None:
        self.experts = experts.experts
        self.hidden = experts.hidden
        self._experts = experts
        self._weights = weights
        self._tokens = tokens

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        places = self._tokens.places
        if places is None:
            return self._experts.add_to(h, ids, weights, residual)
        return _Adapted(self._experts, self._weights, places).add_to(h, ids, weights, residual)


class _Adapted(TorchExperts):
    """The experts in one pass, whose tokens have these adapters."""

    def __init__(self, experts: TorchExperts, weights: ExpertAdapters, places: Tensor) -> None:
        super().__init__(experts.gate_up_weight, experts.down_weight, experts.rule)
        self._weights = weights
        self._places = places

    def gate_up(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        out = super().gate_up(expert, x, tokens)
        return add_present(out, x, self._weights.gate_up[expert], self._places[tokens])

    def down(self, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        out = super().down(expert, x, tokens)
        return add_present(out, x, self._weights.down[expert], self._places[tokens])
