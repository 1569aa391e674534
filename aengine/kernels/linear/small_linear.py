"""x @ weight.T for 1 to 64 rows: the weight is read once, at the speed of memory.

A single row has its own kernel (`one_row`). The kernel also adds a residual and the rows' adapters.

A program owns BLOCK_N rows of the weight and one of SPLITS equal pieces of K. It loads the first columns of its piece
before it waits for the kernel that makes x, so that memory does not idle between two kernels. If K is split, the last
program to arrive at a tile adds the parts up in order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import LIGHT, Launch, find_borders, launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.finish import finish
from aengine.kernels.linear.low_rank import WIDTH, LowRank, add_low_rank
from aengine.kernels.linear.one_row import OneRowConfig, one_row
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants

FEW_ROWS = 16  # the least height of a matrix product
MAX_ROWS = 64
# Columns of one row: up to WHOLE all of a program's weights are in flight, up to LONG they may be.
WHOLE, LONG = 4096, 5120
ROW_BORDERS = (FEW_ROWS, 2 * FEW_ROWS, MAX_ROWS)  # beyond each, `linear_config` changes


@triton.jit
def not_before(x, OVERLAP: tl.constexpr):
    """Return x. If it has 2 bytes an element, its uses stay after the loop that precedes."""
    if OVERLAP and x.dtype.primitive_bitwidth == 16:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@keep_variants
@triton.jit(do_not_specialize=["m", "capacity"])
def _small_linear_kernel(
    x_ptr,  # [m, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, SPLITS, M, BLOCK_N] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    inner_ptr,  # [m, R // RANK, capacity, RANK]; this and those up to `count_ptr` are for RANK only
    b_ptr,  # [places, N, RANK]
    parts_ptr,  # [N] int8
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    m,
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,  # m, padded to the height of a matrix product
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # columns of the piece that are loaded before the wait
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    RANK: tl.constexpr = 0,  # of adapters; 0: there are none
    R: tl.constexpr = 0,
    WIDTH: tl.constexpr = 0,
):
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    PIECE: tl.constexpr = K // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows after the end read the last row and are not stored.
    w_rows = (w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K + split * PIECE)[:, None]
    rows_m = tl.arange(0, M)
    used = (rows_m < m)[:, None]
    x_rows = x_ptr + (rows_m * K)[:, None] + split * PIECE
    early_k = tl.arange(0, EARLY)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: they are loaded while the kernel before this one ends, and are used last.
    w_early = tl.load(w_rows + early_k)
    if RANK:
        part = tl.load(parts_ptr + tile * BLOCK_N).to(tl.int32)  # the whole tile is in one part
        count = tl.load(count_ptr)
    elif OVERLAP:
        gdc_wait()
    x_early = tl.load(x_rows + early_k, mask=used, other=0.0)
    if ADD and SPLITS == 1:  # it is loaded while the weights stream
        residual_at = residual_ptr + (rows_m * N)[:, None] + n[None, :]
        residual = tl.load(residual_at, mask=used & (n < N)[None, :], other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for step in tl.range(EARLY, PIECE, BLOCK_K, num_stages=STAGES):
        if (PIECE - EARLY) % BLOCK_K == 0:
            w = tl.load(w_rows + step + k)
            x = tl.load(x_rows + step + k, mask=used, other=0.0)
        else:
            inside = step + k < PIECE
            w = tl.load(w_rows + step + k, mask=inside, other=0.0)
            x = tl.load(x_rows + step + k, mask=used & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if RANK:
        if OVERLAP:  # the kernel before has waited for x, and computes inner meanwhile
            gdc_wait()
        acc = add_low_rank(
            acc, inner_ptr, b_ptr, rows_m, m, n, part, tiles_ptr, capacity, count, split, SPLITS,
            N, R, RANK, WIDTH, PRECISION, STAGES,
        )  # fmt: skip

    # Before the loop, the use of x_early would delay the loop's first loads; here it delays nothing.
    x_early = not_before(x_early, OVERLAP)
    result = tl.trans(tl.dot(w_early, tl.trans(x_early), acc, input_precision=PRECISION))
    if ADD and SPLITS == 1:
        result += residual
    parts = part_ptr + tile * (SPLITS * M * BLOCK_N) + rows_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    finish(
        result, bias_ptr, residual_ptr, out_ptr, parts, arrived_ptr, used, rows_m, n, tile, split, SPLITS,
        N, SPLITS > 1, True, BIAS, ADD and SPLITS > 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one shape is divided. early: columns loaded before the wait, at most k / splits."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    early: int

    def padded(self, m: int) -> int:
        """Return the height of its matrix products."""
        return max(FEW_ROWS, power_of_two(m))

    def shared_memory(self, m: int, element_size: int) -> int:
        """Return an upper bound in bytes: copies in flight or in use, and the early columns."""
        copies = self.stages * (self.block_n + self.padded(m)) * self.block_k
        return (copies + max(self.block_n, self.padded(m)) * self.early) * element_size + 64


@lru_cache
def linear_config(
    m: int, n: int, k: int, element_size: int, launch: Launch, normed: bool = False
) -> LinearConfig | OneRowConfig | None:
    """Return how to divide a weight [n, k] for m rows; None: a library is faster.

    Measured on an H200 (bench/KERNELS.md). With less shared memory, fewer copies are in flight. normed: x is to be
    normed, by this kernel if that is faster.
    """
    config = _measured(m, n, k, element_size, launch.processors, normed)
    while config and config.stages > 1 and config.shared_memory(m, element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    return config


def dense_borders(n: int, k: int, launch: Launch, most: int) -> list[int]:
    """Return the numbers of rows below `most` after which another kernel multiplies with a weight [n, k].

    For x in 16 bits.
    """

    def kernel(m: int) -> tuple[object, ...]:
        config = linear_config(m, n, k, 2, launch)
        return config, config.padded(m) if isinstance(config, LinearConfig) else 0

    return find_borders(kernel, most)


def _measured(
    m: int, n: int, k: int, element_size: int, processors: int, normed: bool
) -> LinearConfig | OneRowConfig | None:
    if not 0 < m <= MAX_ROWS or k % 16:
        return None
    if element_size > 2:
        return LinearConfig(block_n=32, block_k=32, splits=1, stages=3, warps=4, early=16) if m <= FEW_ROWS else None
    if m == 1 and k >= 1024:
        return _one_row(n, k, normed)
    tiles = -(-n // 64)
    if m > FEW_ROWS:
        return _more_rows(m, n, k, tiles, processors)
    if tiles > 2 * processors:
        return LinearConfig(64, 64, 1, 6, 4, _early(k, 64))
    splits = _splits(tiles, k, processors)
    if tiles * splits >= 1.6 * processors:
        return LinearConfig(64, 128, splits, 3, 4, _early(k // splits, 256))
    if n >= 4096:
        return LinearConfig(16, 512, 1, 3, 1, _early(k, 128))
    return LinearConfig(64, 128, splits, 3, 4, _early(k // splits, 128))


def _one_row(n: int, k: int, normed: bool) -> OneRowConfig:
    """Return the config of a single row. A program loads whole rows of the weight, unless they are long."""
    light = k <= WHOLE and 2 * n * k <= LIGHT
    if k <= LONG and (n > k or light or (normed and 4 * n >= 3 * k)):  # norming x here saves a launch
        columns = 512 if k % 1024 else 1024  # eight for each thread: with more threads, x would be shared unevenly
        few = n <= 2048 or (n <= 3072 and k > 2048) or 4 * n * k <= LIGHT
        block_n = 2 if few else 8 if k <= 1024 else 4
        return OneRowConfig(block_n, columns, 1, columns // 256, k)
    return OneRowConfig(4 if n >= 2048 else 2, 512, 3, 2, 1024)


def _more_rows(m: int, n: int, k: int, tiles: int, processors: int) -> LinearConfig | None:
    """Return the config of 17 to 64 rows."""
    if 2 * n * k <= LIGHT:
        splits = 1 if 4 * tiles > processors or k < 256 else 2
        return LinearConfig(64, 128, splits, 3 + splits, 4, _early(k // splits, 128 * splits))
    if tiles > 3 * processors:  # more than are resident at once
        return None
    if tiles > 2 * processors:
        return LinearConfig(64, 64, 1, 5 if m <= ROW_BORDERS[1] else 4, 4, _early(k, 64))
    splits = _splits(tiles, k, processors)
    if m <= ROW_BORDERS[1]:
        return LinearConfig(64, 128, splits, 3, 4, _early(k // splits, 256))
    splits = max(1, splits // 2)
    if k > 2 * n:
        return LinearConfig(64, 128, splits, 5, 4, _early(k // splits, 128))
    return LinearConfig(64, 64, splits, 8, 4, _early(k // splits, 64))


def _splits(tiles: int, k: int, processors: int) -> int:
    """Return the number of pieces of k, of at least 256 columns, with which two programs a processor are resident."""
    splits = 1
    while tiles * splits <= processors and k % (splits * 256) == 0 and k // (splits * 2) >= 256:
        splits *= 2
    return splits


def _early(piece: int, most: int) -> int:
    """Return the largest power of two within both."""
    return min(most, 1 << (piece.bit_length() - 1))


class SmallLinear:
    """The kernel and its scratch memory. Launches share the scratch, so use one stream at a time."""

    def __init__(self) -> None:
        self._parts = Parts()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        norm: Norm | None = None,
        config: LinearConfig | OneRowConfig | None = None,
        low_rank: LowRank | None = None,
    ) -> Tensor:
        """x [m, k], weight [n, k] (contiguous), bias [n] -> [m, n].

        Raises ValueError if it is not supported.

        Args:
            residual: [m, n], contiguous. It is added, and becomes the result.
            norm: of x, a single row; see `TritonLinear.norms`.
            config: None means the config that was measured for this shape.
            low_rank: what adapters add; for a single row in another form.
        """
        x = x.contiguous()
        (m, k), n = x.shape, weight.shape[0]
        launch = launch_for(x.device)
        config = config or linear_config(m, n, k, x.element_size(), launch, norm is not None)
        if config is None:
            raise ValueError(f"a product of {m} rows with a weight [{n}, {k}] is not for this kernel")
        if isinstance(config, OneRowConfig):
            return one_row(x, weight, config, bias, residual=residual, norm=norm, low_rank=low_rank)
        if norm is not None:
            raise ValueError("a norm goes with products of one row only")
        out = x.new_empty(m, n) if residual is None else residual
        padded = config.padded(m)
        tiles = -(-n // config.block_n)
        # Only split tiles have parts.
        parts, arrived = (
            self._parts(x.device, tiles * config.splits * padded * config.block_n, tiles)
            if config.splits > 1
            else (x, x)
        )
        _small_linear_kernel[(tiles * config.splits,)](
            x, weight, x if bias is None else bias, out, out, parts, arrived, *_tensors(low_rank, x), m,
            0 if low_rank is None else low_rank.capacity,
            N=n, K=k, M=padded, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
            STAGES=config.stages, EARLY=config.early, BIAS=bias is not None,
            ADD=residual is not None, PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
            num_warps=config.warps, launch_pdl=launch.overlap, **_sizes(low_rank),
        )  # fmt: skip
        return out


def _tensors(low_rank: LowRank | None, absent: Tensor) -> tuple[Tensor, ...]:
    if low_rank is None:
        return (absent,) * 5
    return low_rank.inner, low_rank.b, low_rank.parts, low_rank.tiles, low_rank.count


def _sizes(low_rank: LowRank | None) -> dict[str, int]:
    if low_rank is None:
        return {"RANK": 0, "R": 0, "WIDTH": 0}
    return {"RANK": low_rank.rank, "R": low_rank.inner.shape[1] * low_rank.rank, "WIDTH": max(WIDTH, low_rank.rank)}
