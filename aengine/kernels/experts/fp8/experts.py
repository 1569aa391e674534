"""Experts whose matrices stay in FP8 on a CUDA device, from compute capability 8.9 on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aengine.kernels.experts.apart import Apart
from aengine.kernels.experts.config import Fp8Config, fp8_experts_config
from aengine.kernels.experts.few_rows import FewApart, FewConfig, few_rows
from aengine.kernels.experts.fp8.many_rows import Fp8ManyApart, fp8_many_rows
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.experts.single_rows import SingleConfig, single_rows
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.weights import Fp8Weight


class Fp8Experts:
    """Few rows stay in their own type, which is nearer to the truth than FP8; many are rounded as the format says.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(self, gate_up: Fp8Weight, down: Fp8Weight, rule: ExpertRule = SILU) -> None:
        """gate_up [experts, 2 * inter, hidden], gate's rows first; down [experts, hidden, inter]. ValueError: see
        `fits`, and where they do not belong together."""
        self.experts, self.hidden, self._inter = down.weight.shape
        if gate_up.weight.shape != (self.experts, 2 * self._inter, self.hidden):
            raise ValueError(f"gate_up {list(gate_up.weight.shape)} does not belong to down {list(down.weight.shape)}")
        self._gate_up, self._down = Matrices.of_fp8(gate_up), Matrices.of_fp8(down)
        self.rule = rule

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"gate_up": self._gate_up, "down": self._down, "rule": self.rule}

    @staticmethod
    def fits(gate_up: Fp8Weight, down: Fp8Weight) -> bool:
        """Whether the kernels can read them."""
        return Matrices.fits(gate_up) and Matrices.fits(down)

    def add_to(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, *, config: Fp8Config | None = None
    ) -> Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        config = config or fp8_experts_config(
            tokens, top_k, self.experts, self.hidden, h.element_size(), launch_for(h.device)
        )
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        if isinstance(config, SingleConfig):
            return single_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)
        if isinstance(config, FewConfig):
            return few_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)
        return fp8_many_rows(h, self._gate_up, self._down, ids, weights, residual, config, self.rule)

    def apart(self, h: Tensor, ids: Tensor, *, config: Fp8Config | None = None) -> Apart:
        sizes = self.experts, self.hidden, h.element_size()
        config = config or fp8_experts_config(*ids.shape, *sizes, launch_for(h.device), single=False)
        if isinstance(config, SingleConfig):
            raise TypeError("single rows come with their activation")
        plan = make_plan(ids, self.experts, config.height)
        if isinstance(config, FewConfig):
            return FewApart(h, ids, plan, self._gate_up, self._down, config, self.rule)
        return Fp8ManyApart(h, ids, plan, self._gate_up, self._down, config)
