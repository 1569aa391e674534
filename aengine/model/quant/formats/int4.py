"""Functions that several formats of integers share: groups of columns, packed words and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.model.fields import Fields
from aengine.model.quant.checks import unsupported


def read_bits(fields: Fields, method: str, known: Sequence[int] = (4,)) -> int:
    bits = fields.integer("bits", 1, 64, 4)
    if bits not in known:
        raise unsupported(fields, f"{method} with bits {bits}", " and ".join(map(str, known)))
    return bits


def read_group_size(fields: Fields, default: int | None = 128) -> int:
    """Read the number of columns that share a scale. -1: all."""
    size = fields.integer("group_size", -1, 2**20, default)
    if size != -1 and (size < 8 or size % 8):
        raise unsupported(fields, f"group_size {size}", "multiples of 8, and -1")
    return size


def grouped(prefix: str, inputs: int, group_size: int) -> tuple[int, int]:
    """Return the number of groups in a row, and the columns of a group. The last group may have fewer.

    group_size: -1 means one group.

    Raises `UnsupportedModelError` if the last group is too short for the kernels.
    """
    size = inputs if group_size == -1 else group_size
    if inputs != size and math.gcd(inputs, size) % 8:
        raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of 8, in groups of {size}")
    return -(-inputs // size), size


def even_groups(of_groups: Tensor, columns: int, size: int) -> Tensor:
    """Return scales or zeros [..., groups] for groups of equal size.

    If `columns` is not a multiple of `size`, groups are divided into shorter groups, and the values are repeated.
    """
    if not columns % size:
        return of_groups
    shorter = math.gcd(columns, size)
    return of_groups.repeat_interleave(size // shorter, -1)[..., : columns // shorter].contiguous()


def numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack the 4-bit or 8-bit numbers of each int32, lowest first: [..., words] -> [..., 32 / bits * words] uint8."""
    # Flattened first, because a last axis of one element may have any stride.
    pairs = words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # little-endian
    if bits == 8:
        return pairs
    out = torch.empty((*pairs.shape, 2), dtype=torch.uint8, device=words.device)
    torch.bitwise_and(pairs, 15, out=out[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=out[..., 1])
    return out.flatten(-2)


def zeros_unless_symmetric(zero: Tensor, middle: int = 8) -> Tensor | None:
    """Return None if all zeros are `middle`, as in every symmetric checkpoint, else the zeros. Waits for the device."""
    return None if not zero.is_meta and bool((zero == middle).all()) else zero


def sort_columns(codes: Tensor, g_idx: Tensor, group: int, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Sort the columns by their groups. Returns the codes and the order, which is None if they were in order.

    codes: [..., n, k], or only some of the columns.
    g_idx: [..., k], the group of each column. All values are -1 if columns are in order.
    names: names of g_idx for errors.

    Waits for the device.

    Raises `WeightsError` if a group does not have `group` columns (the last may have fewer), and
    `UnsupportedModelError` if `codes` lacks columns that are not in order.
    """
    whole = codes.shape[-1] == g_idx.shape[-1]
    if g_idx.is_meta:  # it has no values to be checked
        return codes, g_idx.long() if whole else None
    groups = g_idx.long()
    expected = torch.arange(groups.shape[-1], device=groups.device) // group
    if bool((groups == expected).all()) or bool((groups == -1).all()):
        return codes, None
    if not whole:
        raise UnsupportedModelError(
            f"{names[0]} orders columns (desc_act), so they cannot be divided among ranks; set "
            f"tensor_parallel_size to 1"
        )
    order = groups.argsort(dim=-1, stable=True)
    tiles = (groups.gather(-1, order) == expected).all(-1).flatten().tolist()
    if not all(tiles):
        raise WeightsError(
            f"{names[tiles.index(False) if len(names) > 1 else 0]} does not name {group} columns a group"
        )
    return codes.gather(-1, order.unsqueeze(-2).expand_as(codes)), order
