"""Checks values from files. Errors name the tensor or the field."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import UnsupportedModelError, WeightsError
from aengine.model.fields import Fields


def check_range(tensor: Tensor, names: Sequence[str], low: float, high: float) -> None:
    """Raise `WeightsError` if a value is outside [low, high] or NaN.

    names: the tensor's name, or one for each index of its first axis. Waits for the device once.
    """
    if tensor.is_meta:  # it has no values
        return
    lowest, highest = torch.stack(torch.aminmax(tensor.float() if tensor.is_floating_point() else tensor)).tolist()
    if low <= lowest and highest <= high:
        return
    if len(names) > 1:
        for name, one in zip(names, tensor, strict=True):
            check_range(one, [name], low, high)
    found = lowest if not low <= lowest else highest
    raise WeightsError(f"{names[0]} holds {found}, its values must be from {low:g} to {high:g}; the file is damaged")


def check_finite(scale: Tensor, names: Sequence[str], *, negative: bool = False, zero: bool = True) -> None:
    """Raise `WeightsError` if a scale is NaN or infinite, or if it is negative or zero and this is not allowed."""
    limits = torch.finfo(torch.float32)
    check_range(scale, names, limits.min if negative else 0.0 if zero else limits.tiny, limits.max)


def unsupported(fields: Fields, what: str, known: str) -> UnsupportedModelError:
    """Return the error for a setting that is not supported. known: the supported settings."""
    return UnsupportedModelError(f"{fields.source}: {what} is not supported, only {known}")


def not_fused(name: str, prefix: str) -> UnsupportedModelError:
    """Return the error for experts in one tensor, if the format only stores experts one by one."""
    return UnsupportedModelError(f"{prefix}: experts fused in one tensor are not known of {name} checkpoints")
