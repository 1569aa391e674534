"""How products with 4-bit weights are cut up, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aengine.kernels.launch import Launch, launch_for, power_of_two
from aengine.kernels.linear.int4.dealt_out import int4_dealt_out_kernel
from aengine.kernels.linear.int4.dequantise import dequantise_kernel
from aengine.kernels.linear.int4.few_rows import int4_few_rows_kernel
from aengine.kernels.linear.int4.packed_codes import BLOCK, PackedCodes
from aengine.kernels.linear.int4.product import int4_product_kernel
from aengine.kernels.linear.int4.unpacking import unpacking

LEAST_ROWS = 8  # of a product


@dataclass(frozen=True, slots=True)
class Int4Config:
    """How one shape is cut up.

    rows: of x, per program, a power of two; splits: of k, in whole blocks of 128 columns; early: steps of each piece
    that are loaded before the wait, 0 to 2; scaled: scales go onto the weights, not onto the sums of a group;
    block_per_warp: a step is as many blocks as there are warps, rather than one; for no more than `rows` rows;
    programs: among which the blocks of all tiles are dealt out evenly, instead of splits; 0: one for each piece;
    prefetch: blocks that a program calls for before the wait.
    """

    block_n: int
    rows: int
    splits: int
    stages: int
    warps: int
    early: int
    scaled: bool = False
    block_per_warp: bool = False
    programs: int = 0
    prefetch: int = 0

    @property
    def step(self) -> int:
        """Blocks."""
        return self.warps if self.block_per_warp else 1

    def shared_memory(self, element_size: int) -> int:
        """Bytes at most: copies of words, of x and of scales on their way; after them, the sums change places."""
        words, x = self.block_n * BLOCK // 2, self.rows * BLOCK * element_size
        step = self.step * (words + x + 16 * self.block_n)
        return max(self.stages * step, 4 * (self.rows + 4) * self.block_n * self.step)


def int4_config(m: int, n: int, blocks: int, element_size: int, launch: Launch) -> Int4Config:
    """How to cut a weight [n, blocks * 128] for m rows, with fewer stages where there is less shared memory."""
    config = _chosen(m, n, blocks, launch.processors)
    while config.stages > 1 and config.shared_memory(element_size) > launch.shared_memory:
        config = replace(config, stages=config.stages - 1)
    while config.rows > LEAST_ROWS and config.shared_memory(element_size) > launch.shared_memory:
        config = replace(config, rows=config.rows // 2)
    return config


def _chosen(m: int, n: int, blocks: int, processors: int) -> Int4Config:
    """Measured on an H200, in the four shapes of an 8B model."""
    if m <= 16:
        return _few_rows(max(LEAST_ROWS, power_of_two(m)), n, blocks, processors)
    if m <= 64:
        return _some_rows(power_of_two(m), n, blocks, processors)
    # Whole tiles where they fill their last round of the processors; a large one reads each x less often.
    large, small = (_filled(-(-n // height) * -(-m // 128), processors) for height in (256, 128))
    if max(1.2 * large, small) >= 0.7:
        return Int4Config(256 if 1.2 * large >= small else 128, 128, 1, 3, 8, 0, scaled=True)
    programs = max(1, min(2 * processors, -(-n // 128) * -(-m // 64) * blocks // 4))
    return Int4Config(128, 64, 1, 3, 4, 0, scaled=True, programs=programs)


def _few_rows(rows: int, n: int, blocks: int, processors: int) -> Int4Config:
    """Everything on its way at once: all programs are resident, or each warp has a block of its own."""
    tiles = -(-n // 64)
    if tiles >= 2 * processors and blocks >= 8:
        return Int4Config(64, rows, 1, 3, 4, 1, block_per_warp=True)
    splits = max(1, min(8 * processors // tiles, blocks // 4))
    return Int4Config(64, rows, splits, 4, 2, min(2, blocks // splits))


def _some_rows(rows: int, n: int, blocks: int, processors: int) -> Int4Config:
    if -(-n // 128) >= processors:
        splits = 2 if blocks >= 8 else 1
        return Int4Config(128, rows, splits, 4 if rows <= 32 else 3, 4, 0, scaled=True)
    tiles = -(-n // 64)
    splits = max(1, min(3 * processors // tiles, blocks // 4, 6 if rows <= 32 else 4))
    if rows <= 32:
        return Int4Config(64, rows, splits, 6, 4, 0, scaled=True)
    return Int4Config(64, rows, splits, 4 if tiles * splits <= 2 * processors else 3, 4, 0, scaled=True)


def _filled(tiles: int, processors: int) -> float:
    """Which part of the processors has work, where each takes one tile after the other."""
    return tiles / (-(-tiles // processors) * processors)


class Int4Product:
    """The kernel and its scratch memory. One stream at a time: launches share the scratch."""

    def __init__(self) -> None:
        self._parts: dict[tuple[torch.device, int], Tensor] = {}  # by their size
        self._arrived: dict[tuple[torch.device, int], Tensor] = {}  # by the number of tiles
        self._dense = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        x: Tensor,
        weight: PackedCodes,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        config: Int4Config | None = None,
    ) -> Tensor:
        """x [m, k] in the order of the codes' columns, bias [n], residual [m, n] (contiguous; becomes the result)
        -> [m, n]. Raises ValueError for a config whose early blocks are more than a piece has.
        """
        x = x.contiguous()
        (m, k), n = x.shape, weight.rows
        launch = launch_for(x.device)
        config = config or int4_config(m, n, weight.blocks, x.element_size(), launch)
        if config.early * config.step > weight.blocks // config.splits:
            raise ValueError(f"{config.early} early blocks do not fit {config.splits} pieces of {weight.blocks} blocks")
        if config.block_per_warp and m > config.rows:
            raise ValueError(f"{m} rows of x are more than the {config.rows} of a program whose warps have blocks each")
        out = x.new_empty(m, n) if residual is None else residual
        if not m:
            return out
        tiles = -(-n // config.block_n) * -(-m // config.rows)
        if config.programs:
            return self._dealt_out(x, weight, bias, residual, out, config, tiles, launch)
        parts, arrived = (
            self._scratch_for(x.device, tiles, tiles * config.splits * config.rows * config.block_n)
            if config.splits > 1
            else (x, x)
        )
        scaled = config.scaled or weight.mxfp4  # powers of two are exact
        how = unpacking(x.dtype if x.device.type != "cpu" else torch.float32, weight.mxfp4, scaled)
        kernel = int4_few_rows_kernel if config.block_per_warp else int4_product_kernel
        more = {"WARPS": config.warps} if config.block_per_warp else {}
        kernel[(tiles * config.splits,)](
            x, weight.words, weight.scales, x if bias is None else bias, out, out, parts, arrived, m, config.splits,
            N=n, K=k, BLOCKS=weight.blocks, GROUP=weight.group, M=config.rows, BLOCK_N=config.block_n,
            SPLIT=config.splits > 1, STAGES=config.stages, EARLY=config.early, PREFETCH=config.prefetch, SCALED=scaled,
            MXFP4=weight.mxfp4, BIAS=bias is not None, ADD=residual is not None,
            ASM=how.assembly, BASE=how.base, PRECISION="ieee" if x.element_size() > 2 else "tf32",
            OVERLAP=launch.overlap, num_warps=config.warps, launch_pdl=launch.overlap, **more,
        )  # fmt: skip
        return out

    def _dealt_out(
        self,
        x: Tensor,
        weight: PackedCodes,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        config: Int4Config,
        tiles: int,
        launch: Launch,
    ) -> Tensor:
        programs = min(config.programs, tiles * weight.blocks)
        parts, arrived = self._scratch_for(x.device, tiles, 2 * programs * config.rows * config.block_n)
        scaled = config.scaled or weight.mxfp4
        how = unpacking(x.dtype if x.device.type != "cpu" else torch.float32, weight.mxfp4, scaled)
        int4_dealt_out_kernel[(programs,)](
            x, weight.words, weight.scales, x if bias is None else bias, out, out, parts, arrived, len(x),
            N=weight.rows, K=x.shape[1], BLOCKS=weight.blocks, GROUP=weight.group, M=config.rows,
            BLOCK_N=config.block_n, PROGRAMS=programs, STAGES=config.stages,
            PREFETCH=config.prefetch, SCALED=scaled, MXFP4=weight.mxfp4,
            BIAS=bias is not None, ADD=residual is not None, ASM=how.assembly, BASE=how.base,
            PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
            num_warps=config.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

    def reserve(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes room for a dense weight of so many elements; before steps are captured into graphs."""
        if self._dense.numel() < size * dtype.itemsize or self._dense.device != device:
            self._dense = torch.empty(size * dtype.itemsize, dtype=torch.uint8, device=device)

    def dequantised(self, weight: PackedCodes, dtype: torch.dtype) -> Tensor:
        """The weight [n, k], its columns in the order of the codes', in memory that the next weight will take."""
        n, k = weight.rows, weight.columns
        self.reserve(n * k, dtype, weight.words.device)
        dense = self._dense[: n * k * dtype.itemsize].view(dtype).view(n, k)
        launch = launch_for(dense.device)
        how = unpacking(dtype if dense.device.type != "cpu" else torch.float32, weight.mxfp4, scaled=True)
        dequantise_kernel[(-(-n // 64) * weight.blocks,)](
            weight.words, weight.scales, dense, N=n, K=k, BLOCKS=weight.blocks, GROUP=weight.group, BLOCK_N=64,
            MXFP4=weight.mxfp4, ASM=how.assembly, BASE=how.base, OVERLAP=launch.overlap,
            num_warps=4, launch_pdl=launch.overlap,
        )  # fmt: skip
        return dense

    def _scratch_for(self, device: torch.device, tiles: int, size: int) -> tuple[Tensor, Tensor]:
        """Parts of so many elements, and counters."""
        if (device, size) not in self._parts:
            self._parts[device, size] = torch.empty(size, dtype=torch.float32, device=device)
        if (device, tiles) not in self._arrived:
            self._arrived[device, tiles] = torch.zeros(tiles, dtype=torch.int32, device=device)
        return self._parts[device, size], self._arrived[device, tiles]
