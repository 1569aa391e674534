"""Some rows of a quantised matrix, and rows added to one: for ranks that have a part of it. Values do not change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from aengine.kernels.linear.weights import Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight
from aengine.model.quant.fuse import fuse
from aengine.model.ranks.shard import Range


def pick_rows(weight: QuantizedWeight, ranges: Sequence[Range]) -> QuantizedWeight:
    """The rows of each range, one range below the other."""
    return fuse([_picked(weight, rows) for rows in ranges], [""] * len(ranges))


def add_rows(weight: QuantizedWeight, count: int) -> QuantizedWeight:
    """So many rows below the others that give zero."""
    if not count:
        return weight
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(_longer(weight.pairs, count), _longer(weight.scale, count))
    if isinstance(weight, Int4Weight):  # a scale of zero makes any code zero
        zero = None if weight.zero is None else _longer(weight.zero, count)
        return Int4Weight(_longer(weight.codes, count), _longer(weight.scale, count), zero, weight.order)
    n, block = weight.weight.shape[-2], weight.block[0]
    if block >= n:
        scale, block = weight.scale, max(block, n + count)
    else:
        scale = _longer(weight.scale, -(-(n + count) // block) - weight.scale.shape[-2])
    values = weight.weight.new_zeros(*weight.weight.shape[:-2], n + count, weight.weight.shape[-1])
    values[..., :n, :] = weight.weight
    return Fp8Weight(values, scale, (block, weight.block[1]), weight.activations, weight.input_scale)


def _picked(weight: QuantizedWeight, rows: Range) -> QuantizedWeight:
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(_part(weight.pairs, rows), _part(weight.scale, rows))
    if isinstance(weight, Int4Weight):
        zero = None if weight.zero is None else _part(weight.zero, rows)
        return Int4Weight(_part(weight.codes, rows), _part(weight.scale, rows), zero, weight.order)
    scale, block = weight.scale, weight.block[0]
    if block >= weight.weight.shape[-2]:
        block = rows[1] - rows[0]
    else:  # where the range cuts through blocks, all become shorter
        finer = math.gcd(block, rows[0])
        scale = scale.repeat_interleave(block // finer, -2)
        scale = _part(scale, (rows[0] // finer, -(-rows[1] // finer)))
        block = finer
    values = _part(weight.weight, rows)
    return Fp8Weight(values, scale, (block, weight.block[1]), weight.activations, weight.input_scale)


def _part(tensor: Tensor, rows: Range) -> Tensor:
    return tensor[..., slice(*rows), :].contiguous()


def _longer(tensor: Tensor, count: int) -> Tensor:
    return pad(tensor, (0, 0, 0, count))
