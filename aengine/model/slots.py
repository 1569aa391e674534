"""Slots for linears and experts. Blocks are built with empty slots, and loading fills them."""

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
    unadapted: Made | None = None  # the loaded linear or experts, without adapters. None: nothing is loaded.

    def load(self, made: Made) -> None:
        """Fill the slot with a loaded linear or experts.

        On a reload, graphs may have captured the memory of the old weights. Then the new weights are copied there.
        Raises `WeightsError` if they do not fit there.
        """
        if self.unadapted is not None and captured(self.unadapted):
            overwrite(self.unadapted, made)
            return
        self.unadapted = made
        self._bind(made)

    def _bind(self, made: Made) -> None:
        raise NotImplementedError


class LinearSlot(_Slot[RegisteredLinear]):
    """A slot that is used as a `Linear`. Its methods are the loaded linear's bound methods, so no call is forwarded.

    Before loading, calling them raises AttributeError.
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
        """Args:
        experts: The number of experts on this rank.
        adapt: Adds adapters to experts. None: there are no adapters here.
        first: The id of this rank's first expert in the whole model.
        """
        self.experts = experts
        self.hidden = hidden
        self.first = first
        self._adapt = adapt

    def _bind(self, made: RegisteredExperts) -> None:
        experts: Experts = made if self._adapt is None else self._adapt(made)
        self.add_to = (OffsetExperts(experts, self.first) if self.first else experts).add_to


def captured(made: Registered) -> bool:
    """Return whether graphs may have captured addresses of the object, because a tensor of it is on a GPU."""
    return any(old.is_cuda for old, _ in _pairs(made, made, ""))


def overwrite(kept: Registered, made: Registered) -> None:
    """Copy every tensor that `made` registers into the memory of the corresponding tensor of `kept`.

    Raises `WeightsError`, before anything is copied, if the two differ in anything except the values of tensors.
    Captured graphs depend on everything else.
    """
    for old, new in list(_pairs(kept, made, type(kept).__name__)):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _pairs(kept: object, made: object, where: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of registered tensors with the same name, one of each object. Raises `WeightsError`."""
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
