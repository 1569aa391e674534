"""The places of linears and experts in their blocks, which loading fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from aengine.kernels.experts.base import Experts
from aengine.kernels.linear.base import Linear
from aengine.kernels.registered import RegisteredExperts, RegisteredLinear
from aengine.model.overwrite import captured, overwrite
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
