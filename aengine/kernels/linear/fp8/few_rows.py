"""x @ weight.T for 1 to 64 rows and a weight in FP8, which is read once.

It is built like `small_linear`: the first columns are loaded before the wait, and K is split with its parts added up in
order. Widening to x's type is exact. The sum of each 128 columns is multiplied by their scale. x may be FP8 too, with a
scale for each 128 columns of a row. A single row has its own kernel.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.finish import finish
from aengine.kernels.linear.fp8.one_row import OneRowConfig, one_row_kernel
from aengine.kernels.linear.fp8.quantize import GROUP, KernelScales
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants

FEW_ROWS = 16  # the least height of a matrix product
MAX_ROWS = 64


@keep_variants
@triton.jit(do_not_specialize=["m"])
def _few_rows_kernel(
    x_ptr,  # [m, K]; e4m3 if X_SCALED
    x_scale_ptr,  # [groups, m], X_SCALED only
    w_ptr,  # [N, K] e4m3
    scale_ptr,  # as in `one_row`
    bias_ptr,
    residual_ptr,  # [m, N]
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, SPLITS, M, BLOCK_N] float32
    arrived_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    X_SCALED: tl.constexpr,
    M: tl.constexpr,  # m, padded to the height of a matrix product
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # groups that are loaded before the wait: 0 to 2
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (K + 127) // 128
    PIECE: tl.constexpr = GROUPS // SPLITS
    SCALES: tl.constexpr = GROUPS if GROUPED else 1
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    first = split * PIECE
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    k = tl.arange(0, 128)[None, :]
    w_rows = (w_ptr + rows.to(tl.int64) * K)[:, None] + k
    row = tl.arange(0, M)
    x_rows = x_ptr + (row * K)[:, None] + k
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: they are loaded while the kernel before this one ends, and are used last.
    early = ()
    for step in tl.static_range(EARLY):
        at = (first + step) * 128
        early = early + (tl.load(w_rows + at, mask=at + k < K, other=0.0),)  # noqa: RUF005 (Triton knows no other way)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for group in tl.range(first + EARLY, first + PIECE, num_stages=STAGES):
        if K % 128 == 0:
            w = tl.load(w_rows + group * 128)
        else:
            w = tl.load(w_rows + group * 128, mask=group * 128 + k < K, other=0.0)
        acc = _multiply(
            acc, w, x_rows, x_scale_ptr, scale_ptr, group, m, row, rows, k, tile,
            N, K, SCALE_ROWS, SCALES, GROUPED, X_SCALED, BLOCK_N, PRECISION,
        )  # fmt: skip
    for step in tl.static_range(EARLY):
        acc = _multiply(
            acc, early[step], x_rows, x_scale_ptr, scale_ptr, first + step, m, row, rows, k, tile,
            N, K, SCALE_ROWS, SCALES, GROUPED, X_SCALED, BLOCK_N, PRECISION,
        )  # fmt: skip
    if not GROUPED:
        acc *= tl.load(scale_ptr + rows // SCALE_ROWS)[:, None]
    parts = part_ptr + tile * (SPLITS * M * BLOCK_N) + row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, parts, arrived_ptr, (row < m)[:, None], row, n, tile, split,
        SPLITS, N, SPLITS > 1, True, BIAS, ADD,
    )  # fmt: skip


@triton.jit
def _multiply(
    acc, w, x_rows, x_scale_ptr, scale_ptr, group, m, row, rows, k, tile,
    N: tl.constexpr, K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    X_SCALED: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of one group of columns, w [BLOCK_N, 128], to acc [BLOCK_N, M]."""
    used = (row < m)[:, None]
    if K % 128 == 0:
        x = tl.load(x_rows + group * 128, mask=used, other=0.0)
    else:
        x = tl.load(x_rows + group * 128, mask=used & (group * 128 + k < K), other=0.0)
    if x.dtype == tl.bfloat16:
        w = w.to(tl.float32)  # the direct conversion to bfloat16 is slower than memory
    if not GROUPED and not X_SCALED:
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    else:
        # Tensor cores add up FP8 with 14 bits, so only 128 columns at a time; the rest is added up in float32.
        part = tl.dot(w.to(x.dtype), tl.trans(x), input_precision=PRECISION)
        if X_SCALED:
            part *= tl.load(x_scale_ptr + group * m + row, mask=row < m, other=0.0)[None, :]
        if GROUPED:
            if SCALE_ROWS % BLOCK_N == 0:
                part *= tl.load(scale_ptr + tile * BLOCK_N // SCALE_ROWS * SCALES + group)
            else:
                part *= tl.load(scale_ptr + rows // SCALE_ROWS * SCALES + group)[:, None]
        acc += part
    return acc


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """How one shape is divided, from two rows on.

    splits divide the number of groups. early: groups loaded before the wait, at most two and at most groups / splits.
    """

    block_n: int
    splits: int
    stages: int
    warps: int
    early: int

    def padded(self, m: int) -> int:
        """Return the height of its matrix products."""
        return max(FEW_ROWS, power_of_two(m))

    def shared_memory(self, m: int, element_size: int) -> int:
        """Return an upper bound in bytes of the elements of x and the weight in flight or in use."""
        return (self.stages + self.early) * GROUP * (self.block_n + self.padded(m) * element_size) + 4096


class Fp8FewRows:
    """The kernels and their scratch memory. Launches share the scratch, so use one stream at a time."""

    def __init__(self) -> None:
        self.parts = Parts()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        scales: KernelScales,
        config: FewRowsConfig | OneRowConfig,
        bias: Tensor | None = None,
        *,
        x_scale: Tensor | None = None,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [m, k], weight [n, k] e4m3 (both contiguous, k a multiple of 16), bias [n] -> [m, n].

        Args:
            x_scale: [groups, m], if x is FP8.
            residual: [m, n], contiguous. It is added, and becomes the result.
            norm: of x, for a single row. Raises ValueError for more rows.
            dtype: of the result, if x is FP8; otherwise it is x's.
        """
        (m, k), n = x.shape, weight.shape[0]
        launch = launch_for(x.device)
        out = x.new_empty(m, n, dtype=dtype or x.dtype) if residual is None else residual
        tiles = -(-n // config.block_n)
        shared = {
            "N": n, "K": k, "SCALE_ROWS": scales.rows, "GROUPED": scales.grouped, "BLOCK_N": config.block_n,
            "BIAS": bias is not None, "ADD": residual is not None, "OVERLAP": launch.overlap,
            "num_warps": config.warps, "launch_pdl": launch.overlap,
        }  # fmt: skip
        bias = x if bias is None else bias
        if isinstance(config, OneRowConfig):
            one_row_kernel[(tiles,)](
                x, weight, scales.scale, bias, out, x if norm is None else norm.weight, out,
                0.0 if norm is None else norm.eps, WIDTH=config.width, AHEAD=config.ahead, NORM=norm is not None,
                **shared,
            )  # fmt: skip
        else:
            if norm is not None:
                raise ValueError("a norm goes with products of one row only")
            height, parts, arrived = config.padded(m), x, x
            if config.splits > 1:
                parts, arrived = self.parts(x.device, tiles * config.splits * height * config.block_n, tiles)
            _few_rows_kernel[(tiles * config.splits,)](
                x, scales.scale if x_scale is None else x_scale, weight, scales.scale, bias, out, out, parts,
                arrived, m, X_SCALED=x_scale is not None, M=height, SPLITS=config.splits, STAGES=config.stages,
                EARLY=config.early, PRECISION="ieee" if x.element_size() > 2 else "tf32", **shared,
            )  # fmt: skip
        return out
