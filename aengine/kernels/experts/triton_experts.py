"""Experts on a CUDA device: the kernels for single rows, few and many, chosen by the shape of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.experts.apart import Apart
from aengine.kernels.experts.config import Config, beside_shared, experts_config
from aengine.kernels.experts.few_rows import FewApart, FewConfig, few_rows
from aengine.kernels.experts.many_rows import ManyApart, many_rows
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.experts.single_rows import SharedMatrices, SingleConfig, single_rows
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

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"gate_up": self._gate_up, "down": self._down, "rule": self.rule}

    def config(self, h: Tensor, top_k: int) -> Config:
        """What computes h [tokens, hidden], of which each token goes to top_k experts."""
        sizes = self.experts, self.hidden, h.element_size()
        return experts_config(len(h), top_k, *sizes, launch_for(h.device))

    def add_to(
        self,
        h: Tensor,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None,
        *,
        config: Config | None = None,
        shared: SharedMatrices | None = None,
    ) -> Tensor:
        """shared: of an expert that every token passes as well, where it goes along (`with_shared`)."""
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        if config is None:
            config = self.config(h, top_k)
            config = config if shared is None else beside_shared(config, self.hidden)
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        if isinstance(config, SingleConfig):
            return single_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule, shared)
        if isinstance(config, FewConfig):
            return few_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)
        return many_rows(h, self._gate_up.weight, self._down.weight, ids, weights, residual, config, self.rule)

    def apart(self, h: Tensor, ids: Tensor, *, config: Config | None = None) -> Apart:
        sizes = self.experts, self.hidden, h.element_size()
        config = config or experts_config(*ids.shape, *sizes, launch_for(h.device), single=False)
        if isinstance(config, SingleConfig):
            raise TypeError("single rows come with their activation")
        plan = make_plan(ids, self.experts, config.height)
        if isinstance(config, FewConfig):
            return FewApart(h, ids, plan, self._gate_up, self._down, config, self.rule)
        return ManyApart(h, ids, plan, self.gate_up, self.down, config, self.rule)


@dataclass(frozen=True, slots=True, eq=False)
class WithShared:
    """Experts and the one that all tokens pass, of a few tokens, in the launches that the former take alone."""

    _experts: TritonExperts
    _shared: SharedMatrices

    @property
    def experts(self) -> int:
        return self._experts.experts

    @property
    def hidden(self) -> int:
        return self._experts.hidden

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        return self._experts.add_to(h, ids, weights, residual, shared=self._shared)
