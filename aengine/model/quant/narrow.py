"""Some rows, or some columns, of a quantised matrix: what a rank has of it. Values do not change."""

from __future__ import annotations

import math

from torch import Tensor

from aengine.errors import UnsupportedModelError
from aengine.kernels.linear.weights import Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight

Range = tuple[int, int]


def narrow(
    weight: QuantizedWeight, name: str, rows: Range | None = None, columns: Range | None = None
) -> QuantizedWeight:
    """The rows, or the columns, from the first of a range up to the second; None: all. name: for messages.

    Raises `UnsupportedModelError` where the columns cut through a group that shares a scale.
    """
    if rows is None and columns is None:
        return weight
    if isinstance(weight, Fp8Weight):
        return _fp8(weight, name, rows, columns)
    groups = None if columns is None else _groups(columns, weight.group, name)
    codes, scale = _part(weight.codes, rows, columns), _part(weight.scale, rows, groups)
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(codes, scale)
    if columns is not None and weight.order is not None:
        raise UnsupportedModelError(
            f"{name}: its columns are ordered by g_idx (desc_act), so that they cannot be dealt out to several GPUs; "
            f"set tensor_parallel_size to 1"
        )
    zero = None if weight.zero is None else _part(weight.zero, rows, groups)
    return Int4Weight(codes, scale, zero, weight.order)


def _fp8(weight: Fp8Weight, name: str, rows: Range | None, columns: Range | None) -> Fp8Weight:
    n, k = weight.weight.shape[-2:]
    block_n, block_k = weight.block
    scale = weight.scale
    if rows is not None:
        if block_n >= n:
            block_n = rows[1] - rows[0]
        else:  # where the range cuts through blocks, all become shorter
            finer = math.gcd(block_n, rows[0])
            scale = scale.repeat_interleave(block_n // finer, -2)
            block_n = finer
            scale = _part(scale, (rows[0] // finer, -(-rows[1] // finer)), None)
    if columns is not None:
        if block_k >= k:
            block_k = columns[1] - columns[0]
        else:
            scale = _part(scale, None, _groups(columns, block_k, name))
    values = _part(weight.weight, rows, columns)
    return Fp8Weight(values, scale.contiguous(), (block_n, block_k), weight.activations, weight.input_scale)


def _groups(columns: Range, group: int, name: str) -> Range:
    if columns[0] % group or columns[1] % group:
        raise UnsupportedModelError(
            f"{name}: a rank's {columns[1] - columns[0]} columns are no multiple of the {group} that share a scale; "
            f"lower tensor_parallel_size"
        )
    return columns[0] // group, columns[1] // group


def _part(tensor: Tensor, rows: Range | None, columns: Range | None) -> Tensor:
    if rows is not None:
        tensor = tensor[..., slice(*rows), :]
    if columns is not None:
        tensor = tensor[..., slice(*columns)]
    return tensor.contiguous()
