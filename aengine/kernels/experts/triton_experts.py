"""Experts on a CUDA device: the kernels for single rows, few and many, chosen by the shape of the step."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.experts.config import Config, experts_config
from aengine.kernels.experts.few_rows import FewConfig, few_rows
from aengine.kernels.experts.many_rows import many_rows
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.experts.single_rows import SingleConfig, single_rows
from aengine.kernels.launch import launch_for


class TritonExperts:
    """Everything is enqueued on the current stream; one stream at a time."""

    def __init__(self, gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> None:
        """gate_up [experts, 2 * inter, hidden], gate's rows first; down [experts, hidden, inter]; both contiguous."""
        self.experts, self.hidden, self._inter = down.shape
        if gate_up.shape != (self.experts, 2 * self._inter, self.hidden):
            raise ValueError(f"gate_up {list(gate_up.shape)} does not belong to down {list(down.shape)}")
        self.gate_up, self.down = gate_up, down
        self._gate_up = Matrices(gate_up)
        self._down = Matrices(down)
        self.rule = rule

    def add_to(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, *, config: Config | None = None
    ) -> Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        config = config or experts_config(
            tokens, top_k, self.experts, self.hidden, self._inter, h.element_size(), launch_for(h.device)
        )
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        if isinstance(config, SingleConfig):
            return single_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)
        if isinstance(config, FewConfig):
            return few_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)
        return many_rows(h, self._gate_up.weight, self._down.weight, ids, weights, residual, config, self.rule)
