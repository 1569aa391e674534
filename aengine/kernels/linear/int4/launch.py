"""Launches the products with 4-bit weights, and writes weights out dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.int4.block import Unpacking, unpacking
from aengine.kernels.linear.int4.config import (
    Int4Config,
    OneRowConfig,
    StreamedRowConfig,
    int4_config,
    one_row_config,
)
from aengine.kernels.linear.int4.few import int4_few_rows_kernel, int4_product_kernel
from aengine.kernels.linear.int4.many import dequantise_kernel, int4_many_rows_kernel
from aengine.kernels.linear.int4.nvfp4_row import nvfp4_row_kernel, row_product
from aengine.kernels.linear.int4.packed_codes import BLOCK, PackedCodes
from aengine.kernels.linear.int4.row import int4_one_row_kernel
from aengine.kernels.linear.int4.streamed_row import OPERANDS, block_product, int4_streamed_row_kernel
from aengine.kernels.parts import Parts


class Int4Product:
    """The kernels and their scratch memory. Launches share the scratch, so use one stream at a time."""

    def __init__(self) -> None:
        self._parts = Parts()
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
        """x [m, k] in the order of the codes' columns, bias [n] -> [m, n].

        Raises: ValueError if the config does not fit the shape.

        Args:
            residual: [m, n], contiguous. It is added, and becomes the result.
            config: None means the config that was measured for this shape.
        """
        x = x.contiguous()
        (m, k), n = x.shape, weight.rows
        launch = launch_for(x.device)
        # The config of one row has too little shared memory for wider rows.
        narrow = x.element_size() == 2
        if config is None and m == 1 and narrow and (one := one_row_config(weight, launch)):
            return self.row(x, weight, bias, residual, one)
        config = config or int4_config(m, n, weight.blocks, x.element_size(), launch, nvfp4=weight.nvfp4)
        if config.early > weight.blocks // config.splits:
            raise ValueError(f"{config.early} early blocks do not fit {config.splits} pieces of {weight.blocks} blocks")
        if config.block_per_warp and (m > config.rows or config.splits > 1 or config.early != 1):
            raise ValueError(f"{m} rows of x are not for {config}")
        out = x.new_empty(m, n) if residual is None else residual
        if not m:
            return out
        tiles = -(-n // config.block_n) * -(-m // config.rows)
        scaled = config.scaled or weight.e2m1  # numbers of 4-bit floats times their scales are exact
        how = _unpacking(x, weight, scaled)
        constants: dict[str, Any] = {
            "N": n, "K": k, "BLOCKS": weight.blocks, "GROUP": weight.group, "M": config.rows,
            "BLOCK_N": config.block_n, "STAGES": config.stages, "E2M1": weight.e2m1, "BIAS": bias is not None,
            "ADD": residual is not None, "ASM": how.assembly, "BASE": how.base, "LIFT": how.lift,
            "PRECISION": _precision(x), "OVERLAP": launch.overlap,
            "num_warps": config.warps, "launch_pdl": launch.overlap,
        }  # fmt: skip
        given = x, weight.words, weight.scales, x if bias is None else bias, out, out
        size, split = config.rows * config.block_n, config.splits > 1
        whole = min(config.rounds * launch.processors, tiles) if config.unpacks_ahead and split else 0
        pieces = (tiles - whole) * config.splits
        scratch = self._parts(x.device, pieces * size, tiles - whole) if split else (x, x)
        if config.unpacks_ahead:
            int4_many_rows_kernel[(whole + pieces,)](
                *given, *scratch, m, whole, config.splits, SPLIT=split, **constants
            )
        elif config.block_per_warp:
            int4_few_rows_kernel[(tiles,)](*given, m, WARPS=config.warps, SCALED=scaled, **constants)
        else:
            int4_product_kernel[(pieces,)](
                *given, *scratch, m, config.splits, SPLIT=split, EARLY=config.early, SCALED=scaled, **constants
            )
        return out

    def row(
        self,
        x: Tensor,
        weight: PackedCodes,
        bias: Tensor | None,
        residual: Tensor | None,
        config: OneRowConfig | StreamedRowConfig,
    ) -> Tensor:
        """Multiply one row, x [1, k]; otherwise like `__call__`.

        Raises: ValueError for MXFP4, for NVFP4 without a stream, for groups of int4 of less than a block, for more
        blocks than the config has, and for a stream of float32 or of fewer blocks than it loads ahead.
        """
        blocks = weight.blocks
        if isinstance(config, StreamedRowConfig):
            fits = config.steps(blocks) >= config.ahead and x.element_size() == 2
            fits = fits and (weight.nvfp4 or weight.group >= BLOCK)
        else:
            fits = blocks <= config.warps * config.steps and weight.group >= BLOCK
        if not fits or weight.columns % 2:
            raise ValueError(f"a row of {weight.columns} in groups of {weight.group} is not for {config}")
        launch, how = launch_for(x.device), _unpacking(x, weight, scaled=False)
        out = x.new_empty(1, weight.rows) if residual is None else residual
        given = x, weight.words, weight.scales, x if bias is None else bias, out, out
        constants: dict[str, Any] = {
            "N": weight.rows, "K": weight.columns, "BLOCKS": blocks, "WARPS": config.warps, "BIAS": bias is not None,
            "ADD": residual is not None, "OVERLAP": launch.overlap, "num_warps": config.warps,
            "launch_pdl": launch.overlap,
        }  # fmt: skip
        if isinstance(config, OneRowConfig):
            int4_one_row_kernel[(-(-weight.rows // config.block_n),)](
                *given, GROUP=weight.group, BLOCK_N=config.block_n, STEPS=config.steps, PAIRS=bool(how.assembly),
                ASM=how.assembly, BASE=how.base, LIFT=how.lift, PRECISION=_precision(x), **constants,
            )  # fmt: skip
            return out
        grid = (-(-weight.rows // 16),)
        constants |= {
            "PADDED": config.padded_steps(blocks), "AHEAD": config.ahead, "maxnreg": config.registers,
        }  # fmt: skip
        if weight.nvfp4:
            nvfp4_row_kernel[grid](*given, **row_product(x.dtype), **constants)
        else:
            int4_streamed_row_kernel[grid](
                *given, GROUP=weight.group, ASM=block_product(x.dtype), OPERANDS=OPERANDS, BASE=how.base,
                LIFT=how.lift, **constants,
            )  # fmt: skip
        return out

    def reserve(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for a dense weight of `size` elements. Call it before steps are captured into graphs."""
        if self._dense.numel() < size * dtype.itemsize or self._dense.device != device:
            self._dense = torch.empty(size * dtype.itemsize, dtype=torch.uint8, device=device)

    def dequantised(self, weight: PackedCodes, dtype: torch.dtype) -> Tensor:
        """Return the weight [n, k] with its columns in the order of the codes. The next weight overwrites it."""
        n, k = weight.rows, weight.columns
        self.reserve(n * k, dtype, weight.words.device)
        dense = self._dense[: n * k * dtype.itemsize].view(dtype).view(n, k)
        self.write_out(weight, dense, overlap=launch_for(dense.device).overlap)
        return dense

    def write_out(self, weight: PackedCodes, dense: Tensor, *, overlap: bool) -> None:
        """Write the weight into `dense` [n, k] with its columns in the order of the codes.

        overlap: whether the kernel before this one may still run; it must not if it writes the weight.
        """
        n, k = dense.shape
        how = _unpacking(dense, weight, scaled=True)
        dequantise_kernel[(-(-n // 64) * weight.blocks,)](
            weight.words, weight.scales, dense, N=n, K=k, BLOCKS=weight.blocks, GROUP=weight.group, BLOCK_N=64,
            E2M1=weight.e2m1, ASM=how.assembly, BASE=how.base, LIFT=how.lift, OVERLAP=overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip


def _unpacking(x: Tensor, weight: PackedCodes, scaled: bool) -> Unpacking:
    """Return how codes become numbers; on a CPU without assembly."""
    return unpacking(x.dtype if x.device.type != "cpu" else torch.float32, weight.e2m1, weight.group, scaled)


def _precision(x: Tensor) -> str:
    return "ieee" if x.element_size() > 2 else "tf32"
