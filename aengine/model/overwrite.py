"""New numbers for weights whose addresses captured graphs hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from aengine.errors import WeightsError


def captured(made: object) -> bool:
    """Whether graphs may hold its addresses: it lies on a GPU."""
    if isinstance(made, Tensor):
        return made.is_cuda
    return _ours(made) and any(captured(getattr(made, name)) for name in _attributes(made))


def overwrite(kept: object, made: object) -> None:
    """Copy every tensor of `made` to where that of `kept` lies, which the same format made of other numbers.

    Raises `WeightsError`, before anything is copied, where the two differ in more than the numbers of tensors: captured
    graphs know the rest.
    """
    for old, new in list(_pairs(kept, made, type(kept).__name__)):
        old.copy_(new)


def _pairs(kept: object, made: object, where: str) -> Iterator[tuple[Tensor, Tensor]]:
    if kept is made:  # what all linears of a model share
        return
    if type(kept) is not type(made):
        raise _differs(where)
    if isinstance(kept, Tensor) and isinstance(made, Tensor):
        if kept.shape != made.shape or kept.dtype != made.dtype or kept.stride() != made.stride():
            raise _differs(where)
        if kept.data_ptr() != made.data_ptr():
            yield kept, made
    elif _ours(kept):
        for name in _attributes(kept):
            yield from _pairs(getattr(kept, name), getattr(made, name, None), f"{where}.{name}")
    elif isinstance(kept, (tuple, list)) and isinstance(made, (tuple, list)):
        if len(kept) != len(made):
            raise _differs(where)
        for place, (old, new) in enumerate(zip(kept, made)):
            yield from _pairs(old, new, f"{where}[{place}]")
    elif kept != made:
        raise _differs(where)


def _ours(thing: object) -> bool:
    return type(thing).__module__.startswith("aengine.")


def _attributes(thing: object) -> list[str]:
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*vars(thing)] if hasattr(thing, "__dict__") else slots


def _differs(where: str) -> WeightsError:
    return WeightsError(f"the quantised weights differ from those that are loaded in {where}; start another engine")
