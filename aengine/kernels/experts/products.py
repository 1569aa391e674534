"""The formats of experts' matrices: each chooses its kernels by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aengine.kernels.experts.base import ExpertPass
from aengine.kernels.experts.config import (
    beside_shared,
    fp8_single_config,
    fp8_tile_config,
    mxfp4_few_config,
    packed_single_config,
    packed_tile_config,
    single_config,
    tile_config,
)
from aengine.kernels.experts.few_rows import FewConfig, FewPass
from aengine.kernels.experts.fp8_rows import Fp8ManyConfig, Fp8ManyPass
from aengine.kernels.experts.many_rows import ManyConfig, ManyPass
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.packed.few_rows import PackedFewConfig, PackedFewPass
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.rows import PackedConfig, PackedPass
from aengine.kernels.experts.packed.single_rows import PackedSingleConfig, fits_single_rows, packed_single_rows
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.experts.single_rows import SharedMatrices, SingleConfig, single_rows
from aengine.kernels.experts.triton_experts import TritonExperts
from aengine.kernels.launch import Launch
from aengine.kernels.linear.weights.e2m1 import E2m1Weight
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.linear.weights.integers import Int4Weight


@dataclass(frozen=True, slots=True, eq=False)
class _Products:
    gate_up: Matrices
    down: Matrices
    rule: ExpertRule

    @property
    def experts(self) -> int:
        return self.down.weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.down.weight.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class FloatProducts(_Products):
    """Matrices in the type of the rows. shared: an expert for all tokens, computed in the same launches."""

    shared: SharedMatrices | None = None

    def single_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> SingleConfig | None:
        config = single_config(tokens, top_k, self.hidden, dtype.itemsize)
        return config if config is None or self.shared is None else beside_shared(config, self.hidden)

    def tile_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> FewConfig | ManyConfig:
        return tile_config(tokens, top_k, self.experts, dtype.itemsize, launch)

    def single_rows(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, config: SingleConfig
    ) -> Tensor:
        return single_rows(h, self.gate_up, self.down, ids, weights, residual, config, self.rule, self.shared)

    def begin(self, h: Tensor, ids: Tensor, plan: Plan, config: FewConfig | ManyConfig) -> ExpertPass:
        if isinstance(config, FewConfig):
            return FewPass(h, ids, plan, self.gate_up, self.down, config, self.rule)
        return ManyPass(h, ids, plan, self.gate_up.weight, self.down.weight, config, self.rule)

    def with_shared(self, shared: SharedMatrices) -> FloatProducts:
        """Add an expert for all tokens. Use the result only for few tokens, and if `shared.can_fuse`."""
        return replace(self, shared=shared)


class Fp8Products(_Products):
    """Matrices in FP8. Few rows stay in their own type, which is more exact; many are rounded as the format says."""

    __slots__ = ()

    def single_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> SingleConfig | None:
        return fp8_single_config(tokens, top_k, self.hidden, dtype.itemsize)

    def tile_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> FewConfig | Fp8ManyConfig:
        return fp8_tile_config(tokens, top_k, self.experts, dtype.itemsize, launch)

    def single_rows(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, config: SingleConfig
    ) -> Tensor:
        return single_rows(h, self.gate_up, self.down, ids, weights, residual, config, self.rule)

    def begin(self, h: Tensor, ids: Tensor, plan: Plan, config: FewConfig | Fp8ManyConfig) -> ExpertPass:
        if isinstance(config, FewConfig):
            return FewPass(h, ids, plan, self.gate_up, self.down, config, self.rule)
        return Fp8ManyPass(h, ids, plan, self.gate_up, self.down, config, self.rule)


@dataclass(frozen=True, slots=True, eq=False)
class PackedProducts:
    """Matrices of 4-bit codes."""

    gate_up: PackedMatrices
    down: PackedMatrices
    rule: ExpertRule
    experts: int

    @property
    def hidden(self) -> int:
        return self.down.rows

    def single_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> PackedSingleConfig | None:
        if self._few_config(tokens, top_k, dtype, launch) is not None:
            return None
        fits = fits_single_rows(self.gate_up) and fits_single_rows(self.down)
        return packed_single_config(tokens, dtype.itemsize) if fits else None

    def tile_config(
        self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch
    ) -> PackedConfig | PackedFewConfig:
        few = self._few_config(tokens, top_k, dtype, launch)
        return packed_tile_config(tokens, top_k, self.experts, dtype.itemsize, launch) if few is None else few

    def _few_config(self, tokens: int, top_k: int, dtype: torch.dtype, launch: Launch) -> PackedFewConfig | None:
        fits = self.gate_up.bare and self.down.bare and self.rule.gated and dtype == torch.bfloat16
        return mxfp4_few_config(tokens, top_k, self.experts, launch) if fits else None

    def single_rows(
        self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, config: PackedSingleConfig
    ) -> Tensor:
        matrices = self.gate_up, self.down
        return packed_single_rows(h, *matrices, ids, weights, residual, self.experts, config, self.rule)

    def begin(self, h: Tensor, ids: Tensor, plan: Plan, config: PackedConfig | PackedFewConfig) -> ExpertPass:
        if isinstance(config, PackedFewConfig):
            return PackedFewPass(h, ids, plan, self.gate_up, self.down, config, self.rule)
        return PackedPass(h, ids, plan, self.gate_up, self.down, config, self.rule)


def float_experts(gate_up: Tensor, down: Tensor, rule: ExpertRule = SILU) -> TritonExperts:
    """gate_up [experts, 2 * inter, hidden], gate's rows first, or up [experts, inter, hidden] if there is no gate; down
    [experts, hidden, inter]; both contiguous.

    Raises: ValueError if the shapes do not match or a matrix is not contiguous.
    """
    _check(gate_up.shape, down.shape, rule)
    return TritonExperts(FloatProducts(Matrices(gate_up), Matrices(down), rule))


def fp8_experts(gate_up: Fp8Weight, down: Fp8Weight, rule: ExpertRule = SILU) -> TritonExperts:
    """Like `float_experts`, from compute capability 8.9 on. Raises: ValueError also if not `Matrices.fits`."""
    _check(gate_up.weight.shape, down.weight.shape, rule)
    return TritonExperts(Fp8Products(Matrices.from_fp8(gate_up), Matrices.from_fp8(down), rule))


def packed_experts(
    gate_up: Int4Weight | E2m1Weight, down: Int4Weight | E2m1Weight, rule: ExpertRule = SILU
) -> TritonExperts:
    """Like `float_experts`. Raises: ValueError also if not `PackedMatrices.fits`."""
    _check(gate_up.shape, down.shape, rule)
    matrices = PackedMatrices.from_weight(gate_up, parts=rule.parts), PackedMatrices.from_weight(down)
    return TritonExperts(PackedProducts(*matrices, rule, down.shape[0]))


def _check(gate_up: tuple[int, ...], down: tuple[int, ...], rule: ExpertRule) -> None:
    experts, hidden, inter = down
    if tuple(gate_up) != (experts, rule.parts * inter, hidden):
        raise ValueError(f"gate_up {list(gate_up)} does not belong to down {list(down)}")
