"""Slots for linears, the output matrix and experts. Blocks are built with empty slots, and loading fills them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Generic, TypeVar

from torch import Tensor

from aengine.errors import WeightsError
from aengine.kernels.base import Kernels
from aengine.kernels.collective.base import Collective
from aengine.kernels.experts.base import Experts, RegisteredExperts
from aengine.kernels.linear.base import Linear, Registered, RegisteredLinear
from aengine.model.ranks.sharded import OffsetExperts

Made = TypeVar("Made", RegisteredLinear, RegisteredExperts)


class _Slot(ABC, Generic[Made]):
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

    @abstractmethod
    def _bind(self, made: Made) -> None:
        """Let blocks use what was loaded, with its adapters."""


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
        self._copy: tuple[LinearSlot, Kernels] | None = None

    def rounded(self, kernels: Kernels) -> LinearSlot:
        """Return a slot with a less exact copy of the linear, without adapters. See `Kernels.rounded`."""
        copy = LinearSlot(self.inputs, self.outputs)
        self._copy = copy, kernels
        self.renew_copy()
        return copy

    def load(self, made: RegisteredLinear) -> None:
        super().load(made)
        self.renew_copy()

    def renew_copy(self) -> None:
        """Make the rounded copy again, because the linear's numbers have changed."""
        if self._copy is not None and self.unadapted is not None:
            copy, kernels = self._copy
            copy.load(kernels.rounded(self.unadapted))

    def _bind(self, made: RegisteredLinear) -> None:
        linear: Linear = made if self._adapt is None else self._adapt(made)
        self.apply, self.apply_activated = linear.apply, linear.apply_activated


class Head:
    """The output matrix. Each rank computes the logits of a part of the vocabulary, its shard."""

    def __init__(self, linear: LinearSlot, ranks: Collective | None, tokens: int) -> None:
        """tokens: the size of the vocabulary. The last ranks may have fewer tokens than `linear` has outputs."""
        self.first = 0 if ranks is None else ranks.index * linear.outputs  # this rank's first token
        self._linear = linear
        self._ranks = ranks
        self._tokens = tokens

    def rounded(self, kernels: Kernels) -> Head:
        """Return a less exact copy without adapters, which is filled when this one is. See `Kernels.rounded`."""
        return Head(self._linear.rounded(kernels), self._ranks, self._tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all tokens, [n, tokens], for x [n, hidden]."""
        return self.all_logits(self.shard_logits(x))

    def shard_logits(self, x: Tensor) -> Tensor:
        """Return the logits of this rank's shard, [n, outputs], for x [n, hidden].

        If the shard has fewer tokens than outputs, the last columns are undefined.
        """
        return self._linear.apply(x)

    def all_logits(self, own: Tensor) -> Tensor:
        """Return the logits of all tokens, [n, tokens], from those of each rank's shard."""
        return own if self._ranks is None else self._ranks.gather(own, self._tokens)


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
