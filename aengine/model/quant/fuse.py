"""Several quantised matrices as one: parts one below the other (q, k and v; gate and up), or experts side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.linear.weights import INT4_MIDDLE, Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight


def fuse(parts: Sequence[QuantizedWeight], names: Sequence[str]) -> QuantizedWeight:
    """The parts [..., n_i, k] as one weight [..., sum of n_i, k], to one product with the same inputs.

    Values do not change: where rows of a part are no multiple of its blocks, all blocks become shorter; where parts
    have one scale each, every row gets one. Static scales of inputs become their maximum, so that no input is cut off
    that a part would have held; calibrated on the same inputs, they are equal anyway.
    Raises `WeightsError`, by `names`, where parts order their columns differently.
    """
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, names, dim=-2)


def stack(experts: Sequence[QuantizedWeight], names: Sequence[str]) -> QuantizedWeight:
    """Weights [n, k] of one shape as one [experts, n, k]."""
    return _joined(experts, names, dim=0)


def _joined(parts: Sequence[QuantizedWeight], names: Sequence[str], dim: int) -> QuantizedWeight:
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    mxfp4 = [part for part in parts if isinstance(part, Mxfp4Weight)]
    if len(fp8) == len(parts):
        return _fp8(fp8, dim)
    if len(int4) == len(parts):
        return _int4(int4, names, dim)
    if len(mxfp4) == len(parts):
        return Mxfp4Weight(_join([part.pairs for part in mxfp4], dim), _join([part.scale for part in mxfp4], dim))
    raise WeightsError(f"{', '.join(names)} are quantised differently and cannot be one matrix")


def _join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.stack(list(tensors)) if dim == 0 else torch.cat(list(tensors), dim)


def _fp8(parts: Sequence[Fp8Weight], dim: int) -> Fp8Weight:
    first = parts[0]
    input_scale = None
    if first.input_scale is not None:
        scales = torch.stack([part.input_scale for part in parts if part.input_scale is not None])
        input_scale = scales if dim == 0 else scales.amax(0)
    block = first.block if dim == 0 else _common_block(parts)
    scale = _join([_finer(part, block[0]) for part in parts], dim)
    return Fp8Weight(_join([part.weight for part in parts], dim), scale, block, first.activations, input_scale)


def _common_block(parts: Sequence[Fp8Weight]) -> tuple[int, int]:
    """A block that tiles each part from its first row on."""
    rows = [part.weight.shape[-2] for part in parts]
    columns = parts[0].block[1]
    if all(part.scale.shape[-2:] == (1, 1) for part in parts) and columns == parts[0].weight.shape[-1]:
        return 1, columns  # a scale each
    return math.gcd(*(part.block[0] for part in parts), *list(accumulate(rows))[:-1]), columns


def _finer(part: Fp8Weight, rows: int) -> Tensor:
    """The scales of blocks of so many rows, which divide the part's own."""
    if rows == part.block[0]:
        return part.scale
    count = -(-part.weight.shape[-2] // rows)
    return part.scale.repeat_interleave(part.block[0] // rows, -2)[..., :count, :]


def _int4(parts: Sequence[Int4Weight], names: Sequence[str], dim: int) -> Int4Weight:
    order = _common_order(parts, names) if dim else _orders(parts)
    dtypes = {part.scale.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    zero = None
    if any(part.zero is not None for part in parts):
        zero = _join([_zero(part) for part in parts], dim)
    scale = _join([part.scale.to(dtype) for part in parts], dim)
    return Int4Weight(_join([part.codes for part in parts], dim), scale, zero, order)


def _zero(part: Int4Weight) -> Tensor:
    if part.zero is not None:
        return part.zero
    return torch.full(part.scale.shape, INT4_MIDDLE, dtype=torch.uint8, device=part.codes.device)


def _common_order(parts: Sequence[Int4Weight], names: Sequence[str]) -> Tensor | None:
    """The one order of columns that all parts have. Waits for the device where there is one."""
    first = parts[0].order
    for part, name in zip(parts, names, strict=True):
        if (part.order is None) != (first is None) or (
            first is not None and part.order is not None and not _equal(part.order, first)
        ):
            raise WeightsError(f"{name} orders its columns otherwise than {names[0]}; they cannot be one matrix")
    return first


def _equal(order: Tensor, other: Tensor) -> bool:
    return order.is_meta or torch.equal(order, other)


def _orders(parts: Sequence[Int4Weight]) -> Tensor | None:
    """An order for each expert, or none."""
    if all(part.order is None for part in parts):
        return None
    plain = torch.arange(parts[0].codes.shape[-1], device=parts[0].codes.device)
    return torch.stack([plain if part.order is None else part.order for part in parts])
