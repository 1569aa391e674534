"""Linears and experts of blocks, which exist before their weights: loading puts in what computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Generic, TypeVar

from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.experts.base import Experts, RegisteredExperts
from aengine.kernels.linear.base import Linear, Registered, RegisteredLinear
from aengine.model.ranks.sharded import OffsetExperts

Made = TypeVar("Made", RegisteredLinear, RegisteredExperts)


class _Slot(Generic[Made]):
    unadapted: Made | None = None  # what the format made of the tensors

    def load(self, made: Made) -> None:
        """Put in what the format made of the checkpoint's tensors.

        A GPU's graphs may have captured the memory of an earlier one. Then that memory gets the new numbers. Raises
        `WeightsError` if they do not fit there.
        """
        if self.unadapted is not None and captured(self.unadapted):
            overwrite(self.unadapted, made)
            return
        self.unadapted = made
        self._bind(made)

    def _bind(self, made: Made) -> None:
        raise NotImplementedError


class LinearSlot(_Slot[RegisteredLinear]):
    """A `Linear` of its block. Its methods are those of the loaded linear itself, so that no call is forwarded.

    Before loading it has none of them: using one raises AttributeError.
    """

    apply: Callable[..., Tensor]  # `Linear.apply`
    apply_activated: Callable[..., Tensor | None]  # `Linear.apply_activated`

    def __init__(self, inputs: int, outputs: int, adapt: Callable[[Linear], Linear] | None = None) -> None:
        """adapt: adds adapters to a linear. None: there are no adapters here."""
        self.inputs = inputs
        self.outputs = outputs
        self._adapt = adapt

    def _bind(self, made: RegisteredLinear) -> None:
        linear: Linear = made if self._adapt is None else self._adapt(made)
        self.apply, self.apply_activated = linear.apply, linear.apply_activated


class ExpertsSlot(_Slot[RegisteredExperts]):
    """The `Experts` of a layer, bound as `LinearSlot` is."""

    add_to: Callable[..., Tensor]  # `Experts.add_to`

    def __init__(
        self, experts: int, hidden: int, adapt: Callable[[Experts], Experts] | None = None, first: int = 0
    ) -> None:
        """experts: how many there are on this rank. adapt: adds adapters to experts. None: there are no adapters here.
        first: the number of the first one among the model's experts.
        """
        self.experts = experts
        self.hidden = hidden
        self.first = first
        self._adapt = adapt

    def _bind(self, made: RegisteredExperts) -> None:
        experts: Experts = made if self._adapt is None else self._adapt(made)
        self.add_to = (OffsetExperts(experts, self.first) if self.first else experts).add_to


def captured(made: Registered) -> bool:
    """Return whether graphs may hold addresses of the object: one of its tensors is on a GPU."""
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
