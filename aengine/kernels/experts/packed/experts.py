"""Experts whose matrices stay in 4-bit codes on a CUDA device."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.experts.config import packed_experts_config
from aengine.kernels.experts.few_rows import FewConfig
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import packed_rows
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.weights import Int4Weight, Mxfp4Weight


class PackedExperts:
    """Everything is enqueued on the current stream; one stream at a time."""

    def __init__(self, gate_up: Int4Weight | Mxfp4Weight, down: Int4Weight | Mxfp4Weight) -> None:
        """gate_up [experts, 2 * inter, hidden], gate's rows first; down [experts, hidden, inter]. ValueError: see
        `fits`, and where they do not belong together."""
        self.experts, self.hidden, self._inter = down.codes.shape
        if gate_up.codes.shape != (self.experts, 2 * self._inter, self.hidden):
            raise ValueError(f"gate_up {list(gate_up.codes.shape)} does not belong to down {list(down.codes.shape)}")
        self._gate_up, self._down = PackedMatrices.of(gate_up), PackedMatrices.of(down)

    @staticmethod
    def fits(gate_up: Int4Weight | Mxfp4Weight, down: Int4Weight | Mxfp4Weight) -> bool:
        """Whether the kernel can read them."""
        return PackedMatrices.fits(gate_up) and PackedMatrices.fits(down)

    def add_to(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, *, config: FewConfig | None = None
    ) -> Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return h if residual is None else residual
        config = config or packed_experts_config(tokens, top_k, self.experts, h.element_size(), launch_for(h.device))
        h, ids, weights = h.contiguous(), ids.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        return packed_rows(h, self._gate_up, self._down, ids, weights, residual, config)
