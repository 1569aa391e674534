"""Groups of columns that are no neighbours (`g_idx`): sorted, so that they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError


def sort_columns(codes: Tensor, g_idx: Tensor, group: int, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """The codes with the columns of each group side by side, and the order that this took; None: they were.

    codes [..., n, k], or some of the columns; g_idx [..., k] is the group of each column, or -1 throughout where there
    is no such order. Raises `WeightsError` unless every group has `group` columns, the last one maybe fewer, and
    `UnsupportedModelError` where there is an order and columns are missing. Waits for the device.
    """
    whole = codes.shape[-1] == g_idx.shape[-1]
    if g_idx.is_meta:  # a rehearsal: there is an order, and nothing to be checked
        return codes, g_idx.long() if whole else None
    groups = g_idx.long()
    expected = torch.arange(groups.shape[-1], device=groups.device) // group
    if bool((groups == expected).all()) or bool((groups == -1).all()):
        return codes, None
    if not whole:
        raise UnsupportedModelError(
            f"{names[0]} orders columns (desc_act), so that they cannot be dealt out to several ranks; set "
            f"tensor_parallel_size to 1"
        )
    order = groups.argsort(dim=-1, stable=True)
    tiles = (groups.gather(-1, order) == expected).all(-1).flatten().tolist()
    if not all(tiles):
        raise WeightsError(
            f"{names[tiles.index(False) if len(names) > 1 else 0]} does not name {group} columns a group"
        )
    return codes.gather(-1, order.unsqueeze(-2).expand_as(codes)), order
