"""What the 4-bit formats share: groups of columns, packed words, and their settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.kernels.linear.weights import INT4_MIDDLE
from aengine.model.fields import Fields
from aengine.model.quant.checks import unsupported


def read_bits(fields: Fields, method: str) -> None:
    bits = fields.integer("bits", 1, 64, 4)
    if bits != 4:
        raise unsupported(fields, f"{method} with bits {bits}", "4")


def read_group_size(fields: Fields, default: int | None = 128) -> int:
    """A number of columns, or -1 for all of them."""
    size = fields.integer("group_size", -1, 2**20, default)
    if size != -1 and (size < 8 or size % 8):
        raise unsupported(fields, f"group_size {size}", "multiples of 8, and -1")
    return size


def grouped(prefix: str, inputs: int, group_size: int) -> tuple[int, int]:
    """How many groups a row has, the last one maybe shorter, and the columns of each; a size of -1 makes it one.

    Raises `UnsupportedModelError` where the last group is so short that kernels could read no parts of that size.
    """
    size = inputs if group_size == -1 else group_size
    if inputs != size and math.gcd(inputs, size) % 8:
        raise UnsupportedModelError(f"{prefix}: {inputs} inputs are no multiple of 8, in groups of {size}")
    return -(-inputs // size), size


def even_groups(of_groups: Tensor, columns: int, size: int) -> Tensor:
    """Scales or zeros [..., groups] of groups that tile the columns: shorter ones if the last one of `size` is."""
    if not columns % size:
        return of_groups
    shorter = math.gcd(columns, size)
    return of_groups.repeat_interleave(size // shorter, -1)[..., : columns // shorter].contiguous()


def nibbles(words: Tensor) -> Tensor:
    """The eight 4-bit numbers of each int32, lowest first: [..., words] -> [..., 8 * words] uint8."""
    # Flat first: a last axis of one may have any stride.
    pairs = words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # little-endian
    out = torch.empty((*pairs.shape, 2), dtype=torch.uint8, device=words.device)
    torch.bitwise_and(pairs, 15, out=out[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=out[..., 1])
    return out.flatten(-2)


def without_middle(zero: Tensor) -> Tensor | None:
    """None where all zeros are 8, as in every symmetric checkpoint. Waits for the device."""
    return None if not zero.is_meta and bool((zero == INT4_MIDDLE).all()) else zero


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
