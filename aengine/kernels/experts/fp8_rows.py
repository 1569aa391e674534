"""Experts in FP8 for many tokens: grouped products of FP8 by FP8, of rows that are rounded and then sorted.

Tiles and their order are those of `many_rows`. The sum of 128 columns by tensor cores is scaled and added up in
float32. If rows have a scale for each 128 columns, the first product rounds what it has activated at its end. A program
computes all columns of a group, one block after the other.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine.kernels.experts.activation import activated, squared_relu
from aengine.kernels.experts.many_rows import ManyConfig, sort_rows
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.inputs import round_inputs
from aengine.kernels.linear.fp8.quantize import E4M3, GROUP
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity", "height", "pairs"])
def _product_kernel(
    x_scale_ptr,  # [K / 128, height] if X_GROUPED, [height] if X_TOKEN, else []; of tokens or of sorted rows
    x_rows,  # descriptor of [pairs, K] e4m3, sorted
    w_rows,  # descriptor of [E * 2 * N, K] e4m3 (GATED: each expert's gate, then up), otherwise [E * N, K]
    scale_ptr,  # [E, SCALE_COUNT, K / 128], or one scale for all of K if not GROUPED
    out_ptr,  # [pairs, N], sorted; e4m3 if ROUND
    out_scale_ptr,  # [N / 128, pairs], ROUND only
    order_ptr,  # [pairs], X_TOKENS only
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    capacity,
    height,
    pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr,
    X_TOKEN: tl.constexpr,
    ACTIVATED: tl.constexpr,
    GATED: tl.constexpr,  # ACTIVATED only: gate, then up
    X_TOKENS: tl.constexpr,  # scales of x are of tokens, not of sorted rows
    ROUND: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    COLUMNS: tl.constexpr = 128 if ROUND else BLOCK_N
    blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    rows = tl.arange(0, BLOCK_M)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    items = tl.load(count_ptr) * blocks
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        tile = item // blocks
        column = item % blocks * COLUMNS
        expert = tl.load(tiles_ptr + tile)
        start = tl.load(tiles_ptr + capacity + tile)
        row = start + rows
        used = row < tl.load(tiles_ptr + 2 * capacity + tile)
        x_scales = x_scale_ptr
        if X_GROUPED or X_TOKEN:
            x_row = row
            if X_TOKENS:
                x_row = tl.load(order_ptr + row, mask=used, other=0) // TOP_K
            x_scales += x_row
        value = _block(
            x_rows, w_rows, x_scales, scale_ptr, expert, start, column, height, used,
            N, K, BLOCK_M, BLOCK_N, STAGES, SCALE_ROWS, SCALE_COUNT, GROUPED, X_GROUPED, X_TOKEN, ACTIVATED, GATED,
            GELU,
        )  # fmt: skip
        out = out_ptr + row.to(tl.int64)[:, None] * N
        n = column + tl.arange(0, BLOCK_N)[None, :]
        inside = used[:, None] & (n < N)
        if ROUND:
            largest = tl.max(tl.abs(value), axis=1)
            if BLOCK_N == 64:
                other = _block(
                    x_rows, w_rows, x_scales, scale_ptr, expert, start, column + BLOCK_N, height, used,
                    N, K, BLOCK_M, BLOCK_N, STAGES, SCALE_ROWS, SCALE_COUNT, GROUPED, X_GROUPED, X_TOKEN, ACTIVATED,
                    GATED, GELU,
                )  # fmt: skip
                largest = tl.maximum(largest, tl.max(tl.abs(other), axis=1))
            scale = tl.where(largest > 0, largest * (1 / 448.0), 1.0)
            tl.store(out_scale_ptr + column // 128 * pairs + row, scale, mask=used)
            if BLOCK_N == 64:
                other = tl.clamp(other / scale[:, None], -448.0, 448.0)
                tl.store(out + BLOCK_N + n, other.to(tl.float8e4nv), mask=inside)
            value = tl.clamp(value / scale[:, None], -448.0, 448.0)
        tl.store(out + n, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _block(
    x_rows, w_rows, x_scales, scale_ptr, expert, start, column, height, used,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COUNT: tl.constexpr, GROUPED: tl.constexpr, X_GROUPED: tl.constexpr,
    X_TOKEN: tl.constexpr, ACTIVATED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Multiply a tile's rows by BLOCK_N rows of its expert's matrix, and activate it if ACTIVATED; GATED: gate's and
    up's rows.
    """
    GROUPS: tl.constexpr = K // 128
    n = tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
    weight_row = expert * (2 * N if GATED else N) + column
    scales = scale_ptr + expert * (SCALE_COUNT * (GROUPS if GROUPED else 1))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        x = x_rows.load([start, group * 128])
        part = tl.dot(x, w_rows.load([weight_row, group * 128]).T)
        x_scale = tl.load(x_scales + group * height, mask=used, other=0.0)[:, None] if X_GROUPED else 1.0
        if GROUPED:
            x_part = _group_scale(scales + group, column, n, N, BLOCK_N, GROUPS, SCALE_ROWS) * x_scale
        else:
            x_part = x_scale
        acc += part * x_part
        if GATED:
            part = tl.dot(x, w_rows.load([weight_row + N, group * 128]).T)
            if GROUPED:
                x_part = _group_scale(scales + group, N + column, N + n, N, BLOCK_N, GROUPS, SCALE_ROWS) * x_scale
            up += part * x_part
    if not X_GROUPED:
        x_scale = tl.load(x_scales, mask=used, other=0.0)[:, None] if X_TOKEN else tl.load(x_scales)
        acc *= x_scale
        if GATED:
            up *= x_scale
    if not GROUPED:
        acc *= tl.load(scales + n // SCALE_ROWS)[None, :]
        if GATED:
            up *= tl.load(scales + (N + n) // SCALE_ROWS)[None, :]
    if GATED:
        acc = activated(acc, up, 0.0, 0.0, GELU)
    elif ACTIVATED:
        acc = squared_relu(acc)
    return acc


@triton.jit
def _group_scale(
    scales, first, n, N: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, SCALE_ROWS: tl.constexpr
):
    """Load the scale of a group of columns for rows n [BLOCK_N], of which `first` is the first: [1, BLOCK_N] or a
    number.
    """
    if SCALE_ROWS % BLOCK_N == 0 and N % BLOCK_N == 0:
        scale = tl.load(scales + first // SCALE_ROWS * GROUPS)
    else:
        scale = tl.load(scales + n // SCALE_ROWS * GROUPS)[None, :]
    return scale


class Fp8ManyConfig(ManyConfig):
    """How experts in FP8 for many rows are divided; a step takes 128 columns. Rows are never gathered."""

    __slots__ = ()

    def shared_memory(self, element_size: int, weight_size: int) -> int:
        """Return an upper bound in bytes of copies in flight or in use, and of scales."""
        return super().shared_memory(1, 1) + 4096


@dataclass(slots=True, eq=False)
class Fp8ManyPass:
    """`ExpertPass` of many rows, in the order of the plan. Inputs are rounded as the format says."""

    h: Tensor
    ids: Tensor
    plan: Plan
    gate_up_matrices: Matrices
    down_matrices: Matrices
    config: Fp8ManyConfig
    rule: ExpertRule
    _scale: Tensor | None = None  # of the rows that `activated` has rounded

    @property
    def sorted(self) -> bool:
        return True

    def activated(self) -> Tensor:
        """Return [pairs, inter], in FP8 if inputs of down have scales for groups of columns."""
        pairs, inter = self.ids.numel(), self.gate_up_matrices.weight.shape[1] // self.rule.parts
        grouped = self.down_matrices.activations == "group"
        inner = self.h.new_empty(pairs, inter, dtype=E4M3 if grouped else self.h.dtype)
        x, scale = self._rounded_rows()
        self._scale = scale.new_empty(inter // GROUP, pairs) if grouped else None
        out_scale = scale if self._scale is None else self._scale
        self._launch(x, scale, self.gate_up_matrices, inner, out_scale, of_tokens=True)
        return inner

    def gate_up(self) -> Tensor:
        x, scale = self._rounded_rows()
        w = self.gate_up_matrices
        out = self.h.new_empty(len(x), w.weight.shape[1])
        self._launch(x, scale, w, out, None, of_tokens=True)
        return out

    def down(self, inner: Tensor) -> Tensor:
        w, scale = self.down_matrices, self._scale
        if scale is None:
            inner, scale = round_inputs(inner, w.activations, w.input_scale)
        out = self.h.new_empty(len(inner), w.weight.shape[1])
        self._launch(inner, scale, w, out, None)
        return out

    def _rounded_rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows of all pairs in FP8, sorted, and the scales of the tokens."""
        w = self.gate_up_matrices
        rounded, scale = round_inputs(self.h, w.activations, w.input_scale)
        return sort_rows(rounded.view(torch.int16), self.plan, self.ids).view(E4M3), scale

    def _launch(
        self, x: Tensor, x_scale: Tensor, w: Matrices, out: Tensor, out_scale: Tensor | None, *,
        of_tokens: bool = False,
    ) -> None:  # fmt: skip
        """out_scale: None if the product is stored as it is; of_tokens: x_scale is of tokens, not of sorted rows."""
        (pairs, n), k, plan = out.shape, x.shape[1], self.plan
        gated = out_scale is not None and self.rule.gated
        cut = self.config.gate_up if gated else self.config.down
        launch = launch_for(x.device)
        rounded = out.dtype == E4M3
        most = plan.capacity * -(-n // (GROUP if rounded else cut.block_n))
        weight, scale = w.pointers
        _product_kernel[(min(most, cut.crowd * launch.processors) if cut.crowd else most,)](
            x_scale,
            TensorDescriptor.from_tensor(x, [self.config.height, GROUP]),
            TensorDescriptor.from_tensor(weight.view(-1, k), [cut.block_n, GROUP]),
            scale, out, x_scale if out_scale is None else out_scale, plan.order, plan.tiles, plan.count,
            plan.capacity, x_scale.shape[-1] if x_scale.dim() else 1, pairs,
            N=n, K=k, TOP_K=self.ids.shape[1], BLOCK_M=self.config.height, BLOCK_N=cut.block_n, STAGES=cut.stages,
            **w.constants, X_GROUPED=x_scale.dim() == 2, X_TOKEN=x_scale.dim() == 1, ACTIVATED=out_scale is not None,
            GATED=gated, X_TOKENS=of_tokens, ROUND=rounded, GELU=self.rule.gelu, OVERLAP=launch.overlap,
            num_warps=cut.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
