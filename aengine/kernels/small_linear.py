"""x @ weight.T for a handful of rows: the weights are read once, at the speed of memory, and nothing else matters.

A program owns BLOCK_N rows of the weight and one of SPLITS equal pieces of K. Where K is split, the last program to arrive at a
tile adds the parts up in order: deterministic, and no second launch.
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


@triton.jit
def _not_before(x, OVERLAP: tl.constexpr):
    """x itself, 2 bytes an element; what is computed from the result stays behind the loops that precede this line."""
    if OVERLAP and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit(do_not_specialize=["m"])
def _small_linear_kernel(
    x_ptr,  # [m, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, SPLITS, M, BLOCK_N] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,  # m, padded to the height of a matrix product; 1: one row, without one
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # columns of the piece that are loaded before the wait
    WEIGHT_FIRST: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    PIECE: tl.constexpr = K // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row, and are not stored.
    w_rows = (w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K + split * PIECE)[:, None]
    rows_m = tl.arange(0, M)
    used = (rows_m < m)[:, None]
    x_rows = x_ptr + (rows_m * K)[:, None] + split * PIECE
    early_k = tl.arange(0, EARLY)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: these are on their way while the kernel before this one ends, and are used last.
    w_early = tl.load(w_rows + early_k)
    if OVERLAP:
        gdc_wait()
    if M > 1:
        x_early = tl.load(x_rows + early_k, mask=used, other=0.0)
    if M == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    elif WEIGHT_FIRST:
        acc = tl.zeros([BLOCK_N, M], tl.float32)
    else:
        acc = tl.zeros([M, BLOCK_N], tl.float32)
    for step in tl.range(EARLY, PIECE, BLOCK_K, num_stages=STAGES):
        if (PIECE - EARLY) % BLOCK_K == 0:
            w = tl.load(w_rows + step + k)
            x = tl.load(x_rows + step + k, mask=used, other=0.0)
        else:
            inside = step + k < PIECE
            w = tl.load(w_rows + step + k, mask=inside, other=0.0)
            x = tl.load(x_rows + step + k, mask=used & inside, other=0.0)
        if M == 1:
            acc += w.to(tl.float32) * x.to(tl.float32)
        elif WEIGHT_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)

    # Before the loop, the use of x_early would hold up the loop's first loads; here, nothing.
    if M == 1:
        x_early = tl.load(x_rows + early_k)
        early = tl.sum(w_early.to(tl.float32) * x_early.to(tl.float32), axis=1)
        result = (tl.sum(acc, axis=1) + early)[None, :]
    elif WEIGHT_FIRST:
        x_early = _not_before(x_early, OVERLAP)
        result = tl.trans(tl.dot(w_early, tl.trans(x_early), acc, input_precision=PRECISION))
    else:
        x_early = _not_before(x_early, OVERLAP)
        result = tl.dot(x_early, tl.trans(w_early), acc, input_precision=PRECISION)
    if SPLITS == 1:
        _write(result, bias_ptr, out_ptr, m, n, rows_m, N, BIAS)
    else:
        size: tl.constexpr = M * BLOCK_N
        parts = part_ptr + tile * (SPLITS * size) + rows_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + split * size, result, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                # Other processors wrote these: read past the first-level cache.
                whole += tl.load(parts + other * size, mask=used, other=0.0, cache_modifier=".cg")
            _write(whole, bias_ptr, out_ptr, m, n, rows_m, N, BIAS)


@triton.jit
def _write(result, bias_ptr, out_ptr, m, n, rows_m, N: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (rows_m * N)[:, None] + n[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=(rows_m < m)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one shape is cut up. early: columns that are loaded before the wait; one_row: plain multiply-adds, for m == 1."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    early: int
    weight_first: bool = True
    one_row: bool = False


# Measured on an H200 (bench/KERNELS.md), by (n, k): for one row, and for 2 to 16.
_MEASURED = {
    (6144, 4096): (LinearConfig(4, 1024, 1, 2, 2, 1024, one_row=True), LinearConfig(16, 512, 1, 3, 1, 512)),
    (4096, 4096): (LinearConfig(8, 1024, 1, 3, 4, 1024, one_row=True), LinearConfig(64, 128, 4, 4, 4, 128)),
    (24576, 4096): (LinearConfig(64, 128, 1, 3, 4, 128), LinearConfig(64, 128, 1, 3, 4, 128)),
    (4096, 12288): (LinearConfig(4, 1024, 1, 2, 2, 1024, one_row=True), LinearConfig(64, 128, 4, 4, 4, 128)),
    (151936, 4096): (LinearConfig(64, 128, 1, 3, 4, 128), LinearConfig(64, 128, 1, 3, 4, 128)),
}


def linear_config(m: int, n: int, k: int, element_size: int, processors: int) -> LinearConfig:
    """How to cut a weight [n, k]. All programs should be resident at once: three with 3 stages on a processor, two with 4."""
    if element_size > 2:
        return LinearConfig(block_n=32, block_k=32, splits=1, stages=3, warps=4, early=16)
    if (n, k) in _MEASURED:
        return _MEASURED[n, k][0 if m == 1 else 1]
    tiles = -(-n // 64)
    best = LinearConfig(64, 128, 1, 3, 4, 16 if k < 128 else 128)
    fill = 0.0
    for stages, resident in ((3, 3 * processors), (4, 2 * processors)):
        for splits in (1, 2, 4, 8, 16):
            if k % (splits * 128) == 0 and tiles * splits <= resident and tiles * splits / resident > fill:
                best, fill = LinearConfig(64, 128, splits, stages, 4, 128), tiles * splits / resident
    return best


class SmallLinear:
    """The kernel and its scratch memory. One stream at a time: launches share the scratch."""

    max_rows = 16

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def supports(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x [m, k] and weight [n, k] are few enough rows in a layout that the kernel reads."""
        return 0 < x.shape[0] <= self.max_rows and weight.is_contiguous() and weight.shape[1] % 16 == 0

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        config: LinearConfig | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [m, k], weight [n, k] (contiguous), bias [n] -> [m, n]."""
        x = x.contiguous()
        m, k = x.shape
        n = weight.shape[0]
        launch = launch_for(x.device)
        config = config or linear_config(m, n, k, x.element_size(), launch.processors)
        if out is None:
            out = x.new_empty(m, n)
        padded = 1 if config.one_row else max(16, power_of_two(m))
        tiles = -(-n // config.block_n)
        size = config.splits * padded * config.block_n if config.splits > 1 else 1
        parts, arrived = self._scratch_for(x.device, tiles, size)
        _small_linear_kernel[(tiles * config.splits,)](
            x, weight, x if bias is None else bias, out, parts, arrived, m,
            N=n, K=k, M=padded, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits, STAGES=config.stages,
            EARLY=config.early,             WEIGHT_FIRST=config.weight_first,
            BIAS=bias is not None, PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
            num_warps=config.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

    def _scratch_for(self, device: torch.device, tiles: int, size: int) -> tuple[Tensor, Tensor]:
        if (tiles, size) not in self._scratch:
            self._scratch[tiles, size] = (
                torch.empty(tiles * size, dtype=torch.float32, device=device),
                torch.zeros(tiles, dtype=torch.int32, device=device),
            )
        return self._scratch[tiles, size]
