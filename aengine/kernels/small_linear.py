"""x @ weight.T for a handful of rows: the weights are read once, at the speed of memory, and nothing else matters.

A program owns BLOCK_N rows of the weight and one of SPLITS equal pieces of K. Before it waits for the kernel that makes x, it
asks for the start of its weights to be brought into the second-level cache, so that memory does not idle between two
kernels. Where K is split, the last program to arrive at a tile adds the parts up in order: deterministic, and no second launch.
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
from aengine.kernels.prefetch import prefetch


@triton.jit
def _multiply(x, w, acc, PRECISION: tl.constexpr, WEIGHT_FIRST: tl.constexpr, M: tl.constexpr):
    """One block: x [M, BLOCK_K] and w [BLOCK_N, BLOCK_K] into acc."""
    if M == 1:
        return acc + w.to(tl.float32) * x.to(tl.float32)
    elif WEIGHT_FIRST:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _as_rows(acc, WEIGHT_FIRST: tl.constexpr, M: tl.constexpr):
    """The accumulator as [M, BLOCK_N]."""
    if M == 1:
        return tl.sum(acc, axis=1)[None, :]
    elif WEIGHT_FIRST:
        return tl.trans(acc)
    else:
        return acc


@triton.jit(do_not_specialize=["m"])
def _small_linear_kernel(
    x_ptr,  # [m, K]
    w_ptr,  # [N, K], or [2 * N, K] with GATED
    bias_ptr,  # [N]
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, SPLITS, 1 or 2, M, BLOCK_N] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,  # m, padded to the height of a matrix product; 1: one row, without one
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # elements of each weight row; 0 for none
    CHUNKS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # the weight's second half makes `up`: out = SiLU(gate) * up
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    PIECE: tl.constexpr = K // SPLITS
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last row, and are not stored.
    rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K + split * PIECE
    if OVERLAP:
        gdc_launch_dependents()
        if PREFETCH > 0:
            # As many requests as there are threads.
            early = rows[:, None] + (tl.arange(0, CHUNKS) * (PREFETCH // CHUNKS))[None, :]
            prefetch(early, PREFETCH // CHUNKS)
            if GATED:
                prefetch(early + N * K, PREFETCH // CHUNKS)
        gdc_wait()

    rows_m = tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + (rows_m * K)[:, None] + split * PIECE + k[None, :]
    w_tile = rows[:, None] + k[None, :]
    if M == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    elif WEIGHT_FIRST:
        acc = tl.zeros([BLOCK_N, M], tl.float32)
    else:
        acc = tl.zeros([M, BLOCK_N], tl.float32)
    up = acc
    for step in tl.range(0, PIECE, BLOCK_K, num_stages=STAGES):
        if PIECE % BLOCK_K == 0:
            w = tl.load(w_tile + step)
            x = tl.load(x_tile + step, mask=(rows_m < m)[:, None], other=0.0)
            if GATED:
                w_up = tl.load(w_tile + N * K + step)
        else:
            inside = (step + k < PIECE)[None, :]
            w = tl.load(w_tile + step, mask=inside, other=0.0)
            x = tl.load(x_tile + step, mask=(rows_m < m)[:, None] & inside, other=0.0)
            if GATED:
                w_up = tl.load(w_tile + N * K + step, mask=inside, other=0.0)
        acc = _multiply(x, w, acc, PRECISION, WEIGHT_FIRST, M)
        if GATED:
            up = _multiply(x, w_up, up, PRECISION, WEIGHT_FIRST, M)

    result = _as_rows(acc, WEIGHT_FIRST, M)
    gated = result
    if GATED:
        gated = _as_rows(up, WEIGHT_FIRST, M)
    if SPLITS == 1:
        _finish(result, gated, bias_ptr, out_ptr, m, n, rows_m, N, BIAS, GATED)
    else:
        HALVES: tl.constexpr = 2 if GATED else 1
        size: tl.constexpr = M * BLOCK_N
        place = rows_m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        used = (rows_m < m)[:, None]
        parts = part_ptr + tile * (SPLITS * HALVES * size)
        tl.store(parts + split * (HALVES * size) + place, result, mask=used)
        if GATED:
            tl.store(parts + split * (HALVES * size) + size + place, gated, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            result = tl.zeros([M, BLOCK_N], tl.float32)
            gated = tl.zeros([M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                # Other processors wrote these: read past the first-level cache.
                part = parts + other * (HALVES * size) + place
                result += tl.load(part, mask=used, other=0.0, cache_modifier=".cg")
                if GATED:
                    gated += tl.load(part + size, mask=used, other=0.0, cache_modifier=".cg")
            _finish(result, gated, bias_ptr, out_ptr, m, n, rows_m, N, BIAS, GATED)


@triton.jit
def _finish(
    result, gated, bias_ptr, out_ptr, m, n, rows_m, N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # Rounded where the two separate kernels round.
        gate = result.to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * gated.to(dtype).to(tl.float32)
    out = out_ptr + (rows_m * N)[:, None] + n[None, :]
    tl.store(out, result.to(dtype), mask=(rows_m < m)[:, None] & (n < N)[None, :])


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one shape is cut up. prefetch: elements of each weight row that are asked for before the wait."""

    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    prefetch: int = 256
    weight_first: bool = True
    one_row: bool = False  # plain multiply-adds instead of matrix products; for m == 1 only


# Measured on an H200 (bench/KERNELS.md), by (n, k): for one row, and for 2 to 16.
_MEASURED = {
    (6144, 4096): (LinearConfig(8, 512, 1, 1, 4, 256, one_row=True), LinearConfig(16, 512, 1, 3, 1, 512)),
    (4096, 4096): (LinearConfig(8, 512, 1, 6, 4, 512, one_row=True), LinearConfig(64, 128, 4, 4, 4, 128)),
    (24576, 4096): (LinearConfig(64, 128, 1, 3, 4, 128), LinearConfig(64, 128, 1, 3, 4, 128)),
    (4096, 12288): (LinearConfig(8, 512, 1, 6, 4, 512, one_row=True), LinearConfig(64, 128, 4, 4, 4, 256)),
    (151936, 4096): (LinearConfig(64, 128, 1, 3, 4, 0), LinearConfig(64, 128, 1, 3, 4, 0)),
}


def linear_config(m: int, n: int, k: int, element_size: int, processors: int) -> LinearConfig:
    """How to cut a weight [n, k]. All programs should be resident at once: three with 3 stages on a processor, two with 4."""
    if element_size > 2:
        return LinearConfig(block_n=32, block_k=32, splits=1, stages=3, warps=4, prefetch=0)
    if (n, k) in _MEASURED:
        return _MEASURED[n, k][0 if m == 1 else 1]
    tiles = -(-n // 64)
    best = LinearConfig(64, 128, 1, 3, 4, 128)
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
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, config: LinearConfig | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [m, k] and weight [n, k] -> [m, n]; gated: weight [2 * n, k] (gate, then up) -> SiLU(gate) * up, [m, n]."""
        x = x.contiguous()
        m, k = x.shape
        n = weight.shape[0] // (2 if gated else 1)
        launch = launch_for(x.device)
        config = config or linear_config(m, n, k, x.element_size(), launch.processors)
        if out is None:
            out = x.new_empty(m, n)
        padded = 1 if config.one_row else max(16, power_of_two(m))
        tiles = -(-n // config.block_n)
        size = config.splits * (2 if gated else 1) * padded * config.block_n if config.splits > 1 else 1
        parts, arrived = self._scratch_for(x.device, tiles, size)
        _small_linear_kernel[(tiles * config.splits,)](
            x, weight, x if bias is None else bias, out, parts, arrived, m,
            N=n, K=k, M=padded, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits, STAGES=config.stages,
            PREFETCH=config.prefetch, CHUNKS=max(1, config.warps * 32 // config.block_n), WEIGHT_FIRST=config.weight_first,
            BIAS=bias is not None, GATED=gated,
            PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
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
