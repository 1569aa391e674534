"""Some columns of an int4 matrix whose groups are scattered over all of them (desc_act). Values do not change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from aengine.kernels.linear.weights import INT4_MIDDLE, Int4Weight
from aengine.model.ranks.shard import Range

CHUNK = 32  # columns: the smallest group that kernels read


def pick_columns(weight: Int4Weight, columns: Range) -> Int4Weight:
    """Those columns alone, of which every group has another number.

    Each group is filled up to whole chunks by columns that give zero, and its scale repeated for each. How many chunks
    there are in the end is rounded, so that the layers of a model have few shapes. Waits for the device.
    """
    order, chunk, width = _order(weight), min(CHUNK, weight.group), columns[1] - columns[0]
    if order.is_meta:  # a rehearsal: nobody knows how many there will be
        count = -(-width // chunk)
        scale = weight.scale.new_empty(len(weight.scale), count)
        codes = weight.codes.new_empty(len(weight.codes), count * chunk)
        return Int4Weight(codes, scale, scale.to(torch.uint8), order.new_empty(count * chunk))
    wanted = (order >= columns[0]) & (order < columns[1])
    kept = wanted.nonzero().flatten()  # sorted by their groups, as all are
    groups = kept // weight.group
    counts = torch.bincount(groups, minlength=weight.scale.shape[-1])
    chunks = -(-counts // chunk)  # of each group
    of_chunk = torch.arange(len(chunks), device=order.device).repeat_interleave(chunks)  # the group of each
    begin = (chunks.cumsum(0) - chunks) * chunk  # of each group, where the columns go
    within = torch.arange(len(kept), device=order.device) - (counts.cumsum(0) - counts)[groups]
    places = begin[groups] + within
    step = max(1, width // chunk // 8)
    more = -len(of_chunk) % step  # chunks
    scale = pad(weight.scale[:, of_chunk], (0, more))
    zero = None if weight.zero is None else pad(weight.zero[:, of_chunk], (0, more), value=INT4_MIDDLE)
    if zero is None:
        codes = weight.codes.new_full((len(weight.codes), scale.shape[-1] * chunk), INT4_MIDDLE)
    else:
        codes = zero.repeat_interleave(chunk, -1)
    codes[:, places] = weight.codes[:, kept]
    sources = order.new_zeros(codes.shape[-1])
    sources[places] = order[kept] - columns[0]
    return Int4Weight(codes, scale, zero, sources)


def _order(weight: Int4Weight) -> Tensor:
    if weight.order is not None:
        return weight.order
    return torch.arange(weight.codes.shape[-1], device=weight.codes.device)
