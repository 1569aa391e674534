"""x @ weight.T for a handful of rows and a weight in FP8: one byte an element is read, at the speed of memory.

It is built like `small_linear`: first columns before the wait, K split with its parts added up in order. Widening is
exact, to float32 for one row and to x's type for more; the sum of each 128 columns is multiplied by their scale. x may
be FP8 as well, with a scale for each 128 columns of a row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.fp8.scales import KernelScales

FEW_ROWS = 16  # the least height of a matrix product
MAX_ROWS = 64


@triton.jit
def _one_row_kernel(
    x_ptr,  # [1, K]
    w_ptr,  # [N, K] e4m3
    scale_ptr,  # [ceil(N / SCALE_ROWS), groups], or 1 in place of groups where not GROUPED
    bias_ptr,  # [N]
    residual_ptr,  # [1, N], ADD only; may be out_ptr
    norm_ptr,  # [K], NORM only
    out_ptr,  # [1, N]
    part_ptr,  # [tiles, SPLITS, 1, BLOCK_N] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,  # groups of 128 columns in a step
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # groups of the piece that are loaded before the wait
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (K + 127) // 128
    PIECE: tl.constexpr = GROUPS // SPLITS
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row, and are not stored.
    rows = tl.minimum(n, N - 1)
    w_rows = (w_ptr + rows.to(tl.int64) * K)[:, None, None]
    scale_rows = scale_ptr + _scale_row(rows, tile, GROUPS if GROUPED else 1, SCALE_ROWS, BLOCK_N)
    column = tl.arange(0, 128)[None, None, :]
    early_group = split * PIECE + tl.arange(0, EARLY)[None, :, None]
    early_k = early_group * 128 + column  # [1, EARLY, 128]
    if OVERLAP:
        gdc_launch_dependents()
    w_early = tl.load(w_rows + early_k, mask=early_k < K, other=0.0)
    if NORM:
        squares = tl.zeros([1, WIDTH, 128], tl.float32)
        g_early = tl.load(norm_ptr + early_k, mask=early_k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, WIDTH, 128], tl.float32)
    for step in tl.range(EARLY, PIECE, WIDTH, num_stages=STAGES):
        group = split * PIECE + step + tl.arange(0, WIDTH)[None, :, None]
        k = group * 128 + column  # [1, WIDTH, 128]
        inside = (k < K) & (group < (split + 1) * PIECE)
        w = tl.load(w_rows + k, mask=inside, other=0.0)
        x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
        if GROUPED:
            x *= tl.load(scale_rows + group, mask=group < GROUPS, other=0.0)
        acc += w.to(tl.float32) * x

    x = tl.load(x_ptr + early_k, mask=early_k < K, other=0.0).to(tl.float32)
    square = 0.0
    if NORM:
        square = tl.sum(tl.reshape(x * x, [EARLY * 128])) + tl.sum(tl.reshape(squares, [WIDTH * 128]))
        x *= g_early
    if GROUPED:
        x *= tl.load(scale_rows + early_group, mask=early_group < GROUPS, other=0.0)
    early = w_early.to(tl.float32) * x
    if EARLY == WIDTH:
        result = tl.sum(tl.reshape(acc + early, [BLOCK_N, WIDTH * 128]), axis=1)
    else:
        result = tl.sum(tl.reshape(acc, [BLOCK_N, WIDTH * 128]), axis=1)
        result += tl.sum(tl.reshape(early, [BLOCK_N, EARLY * 128]), axis=1)
    result = result[None, :]  # [1, BLOCK_N]
    if not GROUPED:
        result *= tl.load(scale_ptr + rows // SCALE_ROWS)[None, :]
    if NORM:
        result *= tl.math.rsqrt(square / K + eps)
    _finish(
        result, bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, 1, n, tl.arange(0, 1), tile, split,
        N, 1, BLOCK_N, SPLITS, BIAS, ADD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _few_rows_kernel(
    x_ptr,  # [m, K]; e4m3 where X_SCALED
    x_scale_ptr,  # [groups, m], X_SCALED only
    w_ptr,  # [N, K] e4m3
    scale_ptr,  # as above
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
    EARLY: tl.constexpr,  # groups that are loaded before the wait: none, one or two
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
    # Weights need not wait: these are on their way while the kernel before this one ends, and are used last.
    if EARLY > 0:
        w_first = tl.load(w_rows + first * 128, mask=first * 128 + k < K, other=0.0)
    if EARLY > 1:
        w_second = tl.load(w_rows + (first + 1) * 128, mask=(first + 1) * 128 + k < K, other=0.0)
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
    if EARLY > 0:
        acc = _multiply(
            acc, w_first, x_rows, x_scale_ptr, scale_ptr, first, m, row, rows, k, tile,
            N, K, SCALE_ROWS, SCALES, GROUPED, X_SCALED, BLOCK_N, PRECISION,
        )  # fmt: skip
    if EARLY > 1:
        acc = _multiply(
            acc, w_second, x_rows, x_scale_ptr, scale_ptr, first + 1, m, row, rows, k, tile,
            N, K, SCALE_ROWS, SCALES, GROUPED, X_SCALED, BLOCK_N, PRECISION,
        )  # fmt: skip
    if not GROUPED:
        acc *= tl.load(scale_ptr + rows // SCALE_ROWS)[:, None]
    _finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, m, n, row, tile, split,
        N, M, BLOCK_N, SPLITS, BIAS, ADD,
    )  # fmt: skip


@triton.jit
def _multiply(
    acc, w, x_rows, x_scale_ptr, scale_ptr, group, m, row, rows, k, tile,
    N: tl.constexpr, K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    X_SCALED: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, M] plus the product of one group of columns, w [BLOCK_N, 128]."""
    used = (row < m)[:, None]
    if K % 128 == 0:
        x = tl.load(x_rows + group * 128, mask=used, other=0.0)
    else:
        x = tl.load(x_rows + group * 128, mask=used & (group * 128 + k < K), other=0.0)
    if x.dtype == tl.bfloat16:
        w = w.to(tl.float32)  # straight to bfloat16 goes through an instruction that is slower than memory
    if not GROUPED and not X_SCALED:
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    else:
        # What tensor cores add up of FP8 has 14 bits: 128 columns at a time, and these in float32.
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


@triton.jit
def _scale_row(rows, tile, scales: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [BLOCK_N, 1, 1] of rows' first scales; [1, 1, 1] where a tile's rows have the same."""
    if SCALE_ROWS % BLOCK_N == 0:
        first = tile * BLOCK_N // SCALE_ROWS * scales + tl.arange(0, 1)
    else:
        first = rows // SCALE_ROWS * scales
    return first[:, None, None]


@triton.jit
def _finish(
    result, bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, m, n, row, tile, split,
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores result [M, BLOCK_N]; where K is split, the last to arrive adds all parts up in order, and stores."""
    used = (row < m)[:, None]
    if SPLITS == 1:
        _store(result, bias_ptr, residual_ptr, out_ptr, used, n, row, N, BIAS, ADD)
    else:
        size: tl.constexpr = M * BLOCK_N
        parts = part_ptr + tile * (SPLITS * size) + row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + split * size, result, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                # Other processors wrote these: read past the first-level cache.
                whole += tl.load(parts + other * size, mask=used, other=0.0, cache_modifier=".cg")
            _store(whole, bias_ptr, residual_ptr, out_ptr, used, n, row, N, BIAS, ADD)


@triton.jit
def _store(
    result, bias_ptr, residual_ptr, out_ptr, used, n, row, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    inside = used & (n < N)[None, :]
    at = (row * N)[:, None] + n[None, :]
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        result += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """How one shape is cut up.

    width: groups of 128 columns in a step (`one_row` only; otherwise one); splits divide the number of groups;
    early: groups loaded before the wait, at most groups / splits (and two, or for `one_row` a power of two).
    """

    block_n: int
    splits: int
    stages: int
    warps: int
    early: int
    width: int = 1
    one_row: bool = False

    def shared_memory(self, m: int, element_size: int) -> int:
        """Bytes at most of x's elements and the weight's that are on their way or being multiplied."""
        height = 1 if self.one_row else max(FEW_ROWS, power_of_two(m))
        return (self.stages * self.width + self.early) * GROUP * (self.block_n + height * element_size) + 4096


@dataclass(frozen=True, slots=True)
class FewRowsOptions:
    """What goes along with a product: x's scales [groups, m] where x is FP8, a sum, the norm of a single row."""

    x_scale: Tensor | None = None
    residual: Tensor | None = None  # [m, n], contiguous; may be `out`
    norm: Norm | None = None
    out: Tensor | None = None  # [m, n]
    dtype: torch.dtype | None = None  # of the result; x's where it is not FP8


class Fp8FewRows:
    """The kernels and their scratch memory. One stream at a time: launches share the scratch."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        scales: KernelScales,
        config: FewRowsConfig,
        bias: Tensor | None = None,
        options: FewRowsOptions = FewRowsOptions(),
    ) -> Tensor:
        """x [m, k], weight [n, k] e4m3 (both contiguous, k a multiple of 16), bias [n] -> [m, n]."""
        (m, k), n = x.shape, weight.shape[0]
        launch = launch_for(x.device)
        residual, norm, x_scale = options.residual, options.norm, options.x_scale
        out = options.out
        if out is None:
            out = x.new_empty(m, n, dtype=options.dtype or x.dtype)
        height = 1 if config.one_row else max(FEW_ROWS, power_of_two(m))
        tiles = -(-n // config.block_n)
        parts, arrived = (
            self._scratch_for(x.device, tiles, config.splits * height * config.block_n) if config.splits > 1 else (x, x)
        )
        shared = {
            "N": n, "K": k, "SCALE_ROWS": scales.rows, "GROUPED": scales.grouped, "BLOCK_N": config.block_n,
            "SPLITS": config.splits, "STAGES": config.stages, "EARLY": config.early, "BIAS": bias is not None,
            "ADD": residual is not None, "OVERLAP": launch.overlap, "num_warps": config.warps,
            "launch_pdl": launch.overlap,
        }  # fmt: skip
        bias = x if bias is None else bias
        residual = x if residual is None else residual
        if config.one_row:
            _one_row_kernel[(tiles * config.splits,)](
                x, weight, scales.scale, bias, residual, x if norm is None else norm.weight, out, parts, arrived,
                0.0 if norm is None else norm.eps, WIDTH=config.width, NORM=norm is not None, **shared,
            )  # fmt: skip
        else:
            _few_rows_kernel[(tiles * config.splits,)](
                x, scales.scale if x_scale is None else x_scale, weight, scales.scale, bias, residual, out, parts,
                arrived, m, X_SCALED=x_scale is not None, M=height,
                PRECISION="ieee" if x.element_size() > 2 else "tf32", **shared,
            )  # fmt: skip
        return out

    def _scratch_for(self, device: torch.device, tiles: int, tile_size: int) -> tuple[Tensor, Tensor]:
        """Parts and counters."""
        key = (tiles, tile_size)
        if key not in self._scratch:
            self._scratch[key] = (
                torch.empty(tiles * tile_size, dtype=torch.float32, device=device),
                torch.zeros(tiles, dtype=torch.int32, device=device),
            )
        return self._scratch[key]
