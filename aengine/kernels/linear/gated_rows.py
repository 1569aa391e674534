"""SiLU(gate) * up of x @ weight.T for many rows, at the end of the product. Gate and up are never stored.

Programs are persistent and take tiles in turn. The tensor memory accelerator copies the operands. A tile has the same
outputs of gate and of up. Its activation is computed while the next tile's first operands are loaded.

bench/KERNELS.md: prefill of the 8B in bf16 1.2 % faster, with 4-bit weights 0.7 %.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine.kernels.launch import Launch, launch_for
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["m"])
def _gated_rows_kernel(
    out_ptr,  # [m, N]
    out_rows,  # descriptor of `out_ptr`
    x_rows,  # descriptor of [m, K]
    w_rows,  # descriptor of [2, N, K], gate first
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,  # tiles of rows that are computed together, so that both operands stay in the cache
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wide: tl.constexpr = N // BLOCK_N
    high = tl.cdiv(m, BLOCK_M)
    dtype = out_ptr.dtype.element_ty
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for tile in tl.range(tl.program_id(0), high * wide, tl.num_programs(0), flatten=True):
        band = tile // (BAND * wide) * BAND
        height = tl.minimum(high - band, BAND)
        row = (band + tile % (BAND * wide) % height) * BLOCK_M
        column = tile % (BAND * wide) // height * BLOCK_N
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            x = x_rows.load([row, k])
            w = w_rows.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        # Both are rounded as a product and a separate launch would round them.
        gate = gate.to(dtype).to(tl.float32)
        active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        out_rows.store([row, column], (active * up.to(dtype).to(tl.float32)).to(dtype))


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """How the product is cut into tiles of block_m rows by block_n outputs."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    band: int = 16
    stages: int = 4
    warps: int = 8


CONFIG = GatedConfig()
LEAST_ROUNDS = 3


def gated_config(m: int, n: int, k: int, element_size: int, launch: Launch) -> GatedConfig | None:
    """Return the config for m rows of k inputs and n outputs.

    None means that the library and a launch for SiLU(gate) * up are faster, or that the shape does not fit. A full
    round of tiles takes 0.9 of their time on an H200 (bench/KERNELS.md). But it takes as long if tiles are not full or
    processors idle.
    """
    config = CONFIG
    if not launch.warp_groups or element_size != 2 or n % config.block_n or k % config.block_k:
        return None
    rounds = triton.cdiv(triton.cdiv(m, config.block_m) * (n // config.block_n), launch.processors)
    outputs = rounds * launch.processors * config.block_m * config.block_n  # of full rounds
    return config if rounds >= LEAST_ROUNDS and 10 * outputs <= 11 * m * n else None


def fewest_rows(n: int, k: int, element_size: int, launch: Launch, rows: range) -> int | None:
    """Return the first number of these rows for which the kernel is used, or None."""
    return next((m for m in rows if gated_config(m, n, k, element_size, launch) is not None), None)


def gated_rows(x: Tensor, weight: Tensor, config: GatedConfig) -> Tensor:
    """x [m, k], weight [2 * n, k], gate first, contiguous; n and k multiples of the blocks -> [m, n] in x's dtype."""
    (m, k), n = x.shape, weight.shape[0] // 2
    x, out = x.contiguous(), x.new_empty(m, n)
    launch = launch_for(x.device)
    tiles = triton.cdiv(m, config.block_m) * (n // config.block_n)
    if not tiles:
        return out
    _gated_rows_kernel[(min(launch.processors, tiles),)](
        out,
        TensorDescriptor(out, [m, n], [n, 1], [config.block_m, config.block_n]),
        TensorDescriptor(x, [m, k], [k, 1], [config.block_m, config.block_k]),
        TensorDescriptor(weight, [2, n, k], [n * k, k, 1], [2, config.block_n, config.block_k]),
        m, N=n, K=k, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BAND=config.band,
        PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=launch.overlap,
    )  # fmt: skip
    return out
