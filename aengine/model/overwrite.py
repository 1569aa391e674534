"""New numbers for weights whose addresses captured graphs hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.registered import Registered


def captured(made: Registered) -> bool:
    """Return whether graphs may hold addresses of the object: one of its tensors lies on a GPU."""
    return any(old.is_cuda for old, _ in _pairs(made, made, ""))


def overwrite(kept: Registered, made: Registered) -> None:
    """Copy every tensor that `made` registers to the memory of the same one of `kept`.

    Both were made by the same format, of different numbers. Raises `WeightsError`, before anything is copied, if the
    two differ in more than the numbers of tensors: captured graphs know the rest.
    """
    for old, new in list(_pairs(kept, made, type(kept).__name__)):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _pairs(kept: object, made: object, where: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the registered tensors of both, those of the same name together."""
    if type(kept) is not type(made):
        raise _differs(where)
    if isinstance(kept, Tensor) and isinstance(made, Tensor):
        if kept.shape != made.shape or kept.dtype != made.dtype or kept.stride() != made.stride():
            raise _differs(where)
        yield kept, made
    elif isinstance(kept, Registered) and isinstance(made, Registered):
        new = made.parameters
        for name, old in kept.parameters.items():
            yield from _pairs(old, new[name], f"{where}.{name}")
    elif is_dataclass(kept):
        for field in fields(kept):
            yield from _pairs(getattr(kept, field.name), getattr(made, field.name), f"{where}.{field.name}")
    elif isinstance(kept, (tuple, list)) and isinstance(made, (tuple, list)):
        if len(kept) != len(made):
            raise _differs(where)
        for place, (old, one) in enumerate(zip(kept, made)):
            yield from _pairs(old, one, f"{where}[{place}]")
    elif kept != made:
        raise _differs(where)


def _differs(where: str) -> WeightsError:
    return WeightsError(f"the quantised weights differ from those that are loaded in {where}; start another engine")
