"""Experts whose matrices stay in 4-bit codes on a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aengine.kernels.experts.apart import Apart
from aengine.kernels.experts.config import PackedAnyConfig, packed_experts_config
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import PackedApart, packed_rows
from aengine.kernels.experts.packed.single_rows import PackedSingleConfig, fits_single_rows, packed_single_rows
from aengine.kernels.experts.routing.plan import make_plan
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.weights import Int4Weight, Mxfp4Weight


class PackedExperts:
    """Everything is enqueued on the current stream; one stream at a time."""

    def __init__(
        self, gate_up: Int4Weight | Mxfp4Weight, down: Int4Weight | Mxfp4Weight, rule: ExpertRule = SILU
    ) -> None:
        """gate_up [experts, 2 * inter, hidden], gate's rows first; down [experts, hidden, inter]. ValueError: see
        `fits`, and where they do not belong together."""
        self.experts, self.hidden, inter = down.shape
        if gate_up.shape != (self.experts, 2 * inter, self.hidden):
            raise ValueError(f"gate_up {list(gate_up.shape)} does not belong to down {list(down.shape)}")
        self._gate_up, self._down = PackedMatrices.of(gate_up, parts=2), PackedMatrices.of(down)
        self._single = fits_single_rows(self._gate_up) and fits_single_rows(self._down)
        self.rule = rule

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"gate_up": self._gate_up, "down": self._down, "rule": self.rule}

    @staticmethod
    def fits(gate_up: Int4Weight | Mxfp4Weight, down: Int4Weight | Mxfp4Weight) -> bool:
        """Whether the kernels can read them."""
        return PackedMatrices.fits(gate_up) and PackedMatrices.fits(down)

    def add_to(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, *, config: PackedAnyConfig | None = None
    ) -> Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        config = config or packed_experts_config(
            tokens, top_k, self.experts, h.element_size(), launch_for(h.device), self._single
        )
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        matrices = h, self._gate_up, self._down, ids, weights, residual, self.experts
        if isinstance(config, PackedSingleConfig):
            return packed_single_rows(*matrices, config, self.rule)
        return packed_rows(*matrices, config, self.rule)

    def apart(self, h: Tensor, ids: Tensor, *, config: PackedAnyConfig | None = None) -> Apart:
        sizes = self.experts, h.element_size()
        config = config or packed_experts_config(*ids.shape, *sizes, launch_for(h.device), single=False)
        if isinstance(config, PackedSingleConfig):
            raise TypeError("single rows come with their activation")
        plan = make_plan(ids, self.experts, config.height)
        return PackedApart(h, ids, plan, self._gate_up, self._down, config, self.rule)
